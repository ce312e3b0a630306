"""What the tests of offloading run on ranks, of either tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.dist.trainer_functions import rollouts
from verifier.launch.rank import RankContext
from verifier.megatron.offload_megatron import HostState, state_tensors
from verifier.megatron.optimizer_megatron import make_optimizer
from verifier.megatron.step_megatron import device_of, params_synced, train_step
from verifier.mesh import Mesh
from verifier.model.provider_megatron import DataParallel, build
from verifier.plan.digest import digest_tensors

CYCLES = 3


def cycles(context: RankContext) -> dict[str, Any]:
    """Three steps; between them, if asked for, the state goes to the host and comes back.

    Returns:
        Digests of all state after each step, what it is after each return, whether anything was left while it was away,
        torch's own count of bytes on the GPU before and during it, and digests of the weights at the end.
    """
    args = context.args
    trainer = build(
        args["checkpoint"], Mesh(**args["mesh"]), dtype=args["dtype"], tier=args["tier"],
        data_parallel=DataParallel(**args["data_parallel"]),
    )  # fmt: skip
    optimizer = make_optimizer(trainer, learning_rate=1e-3)
    device = device_of(trainer)
    host, batch = HostState(device), rollouts()
    said: dict[str, Any] = {"stepped": [], "returned": [], "left": [], "allocated": [], "freed": []}
    for _ in range(CYCLES):
        train_step(trainer, optimizer, batch)
        held = list(state_tensors(trainer, optimizer))
        said["stepped"].append(_digests(held))
        if not args["offload"]:
            continue
        before = _allocated(device)
        said["freed"].append(host.leave(held))
        said["left"].append(sum(tensor.untyped_storage().nbytes() for tensor in held if tensor.device == device))
        said["allocated"].append([before, _allocated(device)])
        host.come_back()
        said["returned"].append(_digests(held))
    with params_synced(trainer):
        said["weights"] = _digests(item for chunk in trainer.chunks for item in chunk.parameters())
    return said


def _digests(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Of copies: torch resizes no memory on the host that numpy has seen."""
    return list(digest_tensors(tensor.detach().clone() for tensor in tensors))


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0
