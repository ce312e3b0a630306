"""Rank shards to whole tensors under their checkpoint names, by megatron-bridge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verifier.model.provider_megatron import TrainerModel
from verifier.train.step_megatron import params_synced

if TYPE_CHECKING:
    import torch


def export(trainer: TrainerModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint, one at a time, on every rank.

    A collective: all ranks must draw every element, in lockstep. The conversion tasks are made anew on each call, since
    they hold the parameters that were there when they were made. Dtypes are the trainer's own; nothing is cast.

    Yields:
        Checkpoint name and whole tensor, on the host in the CPU tier and on the rank's device in the GPU tier.
    """
    with params_synced(trainer):
        yield from trainer.bridge.export_hf_weights(trainer.chunks, cpu=trainer.tier == "cpu", show_progress=False)
