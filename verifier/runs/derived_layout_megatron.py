"""The layout of a model on its ranks, derived by loading a numbered checkpoint through Megatron-Bridge.

It is derived in a job of its own, from a model that is built for nothing else, so that the trainer that is judged is
the one that a run without it would have.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from verifier.errors import ContractError
from verifier.export.derived import DerivedLayout, Held, derive, held_by
from verifier.export.live_weights import LiveWeights
from verifier.launch.child import entered
from verifier.mesh import Mesh
from verifier.model import provider_megatron
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.numbered import ZEROS, Numbering, numbering_of, write_numbered
from verifier.model.provider_megatron import TrainerModel
from verifier.platform.gather_json import gather_json

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def run(context: RankContext) -> dict[str, Any]:
    """Rank function: the layout of `checkpoint` on `mesh` as JSON, from rank 0."""
    args = context.args
    source, folder = open_checkpoint(args["checkpoint"]), Path(args["folder"])
    numbering = numbering_of(source, args["dtype"])
    if isinstance(numbering, str):
        raise ContractError(f"no numbered checkpoint of {source.path}: {numbering}")
    with entered(args["within"], None, context):
        with _written(folder, source, numbering, ZEROS) as path:
            trainer = provider_megatron.build(
                path, Mesh(**args["mesh"]), dtype=args["dtype"], tier=args["tier"], deadline_s=args["deadline_s"],
                fixes=args["fixes"],
            )  # fmt: skip
        layout = derived_layout(trainer, source, numbering, folder)
    return layout.to_json() if context.rank == 0 else {}


def derived_layout(trainer: TrainerModel, source: Checkpoint, numbering: Numbering, folder: Path) -> DerivedLayout:
    """Load every pass of a numbered checkpoint over the weights of all ranks, and derive the layout. A collective.

    Contents of the last pass stay: the real weights have to be loaded afterwards. All ranks see `folder`.
    """
    held = held_by(_contents(trainer, source, numbering, folder), numbering)
    ranks = [msgspec.convert(rows, list[Held]) for rows in gather_json(msgspec.to_builtins(held))]
    return derive(trainer.mesh, ranks, numbering)


def _contents(
    trainer: TrainerModel, source: Checkpoint, numbering: Numbering, folder: Path
) -> list[tuple[int, str, bool, dict[str, Any]]]:
    """Contents of each parameter and checkpointed buffer after each pass; NaN where no weight reached it."""
    live = LiveWeights(trainer.chunks, None, trainer.mesh, dist.get_rank())
    parameters = {item.data_ptr() for chunk in trainer.chunks for item in chunk.parameters()}
    read: dict[tuple[int, str, bool], dict[str, Any]] = defaultdict(dict)
    for which in numbering.passes:
        for _, _, tensor in live.tensors():
            tensor.fill_(math.nan if tensor.is_floating_point() else -1)
        with (
            _written(folder, source, numbering, which) as path,
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            trainer.bridge.load_hf_weights(trainer.chunks, str(path))
        for chunk, name, tensor in live.tensors():
            is_buffer = tensor.data_ptr() not in parameters
            read[chunk, name, is_buffer][which] = tensor.float().cpu().numpy().copy()
    return [(*key, contents) for key, contents in read.items()]


@contextlib.contextmanager
def _written(folder: Path, source: Checkpoint, numbering: Numbering, which: str) -> Iterator[Path]:
    """A pass on disk, written by rank 0, while the context lasts. A collective."""
    path = folder / which.replace(" ", "-")
    if dist.get_rank() == 0:
        write_numbered(path, source, numbering, which)
    dist.barrier()
    yield path
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
