"""Export of rank shards as whole tensors under checkpoint names, by megatron-bridge."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.megatron.step_megatron import params_synced
from verifier.model.provider_megatron import TrainerModel

if TYPE_CHECKING:
    import torch


def export(trainer: TrainerModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint, one at a time, on every rank. A collective: ranks draw in lockstep.

    Conversion tasks hold the parameters that existed when the tasks were made, so each call makes its own. Nothing is
    cast.

    Yields:
        (checkpoint name, whole tensor), on the host in the CPU tier and on the rank's device in the GPU tier.
    """
    with params_synced(trainer):
        yield from trainer.bridge.export_hf_weights(trainer.chunks, cpu=trainer.tier == "cpu", show_progress=False)


def save(trainer: TrainerModel, folder: Path, *, whole: bool) -> None:
    """Write a checkpoint by megatron-bridge: the source's shards, index and config.json, no tokenizer. A collective.

    This calls megatron-bridge's writer and not `save_hf_pretrained`, which needs modelopt. If tensors are missing, the
    writer writes the others and only prints a warning. In strict mode it raises on rank 0 alone while others wait.
    Rank 0 writes; unless it is to be whole, config.json alone.
    """
    pretrained = trainer.bridge.hf_pretrained
    pretrained.tokenizer = None
    if dist.get_rank() == 0:
        pretrained.save_artifacts(folder)
    if whole:
        with params_synced(trainer), contextlib.redirect_stdout(io.StringIO()):
            stream = trainer.bridge.export_hf_weights(trainer.chunks, cpu=True, show_progress=False)
            pretrained.state.source.save_generator(stream, folder, strict=False)
