"""A deterministic change of every tensor, the same on every rank and every machine."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from verifier.errors import UsageError

if TYPE_CHECKING:
    import torch

    from verifier.model.checkpoint import Checkpoint
    from verifier.probes.weights_megatron import LiveWeights

RELATIVE_SIZE = 0.05


def moved(tensor: torch.Tensor, name: str, seed: str) -> torch.Tensor:
    """Every element times ``1 + 0.05 u``, with u uniform in [-1, 1) from a stream keyed by name and seed.

    Args:
        tensor: any floating dtype; others are returned as they are.
        name: checkpoint name, so that no two tensors move alike.
        seed: of the whole update.

    Returns:
        A new tensor of the same dtype and shape.
    """
    import numpy
    import torch

    if not tensor.is_floating_point():
        return tensor
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    raw = numpy.random.Philox(key=key).random_raw(tensor.numel())
    unit = (raw >> numpy.uint64(40)).astype(numpy.float64) / 2.0**23 - 1.0
    factor = torch.from_numpy(1.0 + RELATIVE_SIZE * unit).view(tensor.shape)
    return (tensor.double() * factor).to(tensor.dtype)


def move(live: LiveWeights, source: Checkpoint, seed: str) -> None:
    """Make every live tensor of a rank what the source holds there, moved.

    Raises:
        UsageError: a family without a layout row, of which nobody says what is where.
    """
    places = live.placements()
    if not places:
        raise UsageError("--update noise needs a model family with a layout row; use --update step")
    for chunk, name, tensor in live.tensors():
        whole = places[chunk, name].shard(lambda tensor_name: moved(source.read(tensor_name), tensor_name, seed))
        tensor.copy_(whole.to(tensor.device))
