"""Rank shards to whole tensors under their checkpoint names, by megatron-bridge."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.errors import ContractError
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


def save(trainer: TrainerModel, folder: Path, *, whole: bool) -> None:
    """Have megatron-bridge write a checkpoint: in its source's shards, with index and config.json. A collective.

    Its writer is called, and not `save_hf_pretrained`, which needs modelopt to tell that nothing is quantized. Where
    tensors are missing it writes the others, and says so on a terminal only; when told to be strict it raises, but on
    rank 0 alone, while the other ranks wait for it. No tokenizer is written: a run's tokens are numbers.

    Args:
        trainer: whose weights.
        folder: to write to, by rank 0.
        whole: weights too; else config.json alone.
    """
    pretrained = trainer.bridge.hf_pretrained
    pretrained.tokenizer = None
    if dist.get_rank() == 0:
        pretrained.save_artifacts(folder)
    if whole:
        with params_synced(trainer), contextlib.redirect_stdout(io.StringIO()):
            stream = trainer.bridge.export_hf_weights(trainer.chunks, cpu=True, show_progress=False)
            pretrained.state.source.save_generator(stream, folder, strict=False)


def export_gradients(trainer: TrainerModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradient of every parameter under its checkpoint name, as `backward` left it. A collective.

    The conversion only permutes, splits and joins, so what is true of weights is true of their gradients: they pass
    through it in the weights' place.

    Yields:
        Checkpoint name and whole float32 gradient. Buffers, such as a router's score bias, have none and are left out.

    Raises:
        ContractError: the trainer was built for forward passes only, holds gradients of its own shard only, or keeps
            parameters in another dtype than gradients.
    """
    options = trainer.data_parallel
    if options is None or options.distributed_optimizer:
        raise ContractError("whole gradients need a trainer built with `data_parallel` and no distributed optimizer")
    if trainer.provider.bf16:
        raise ContractError("gradients are exported from a float32 trainer only")
    tasks = trainer.bridge.get_conversion_tasks(trainer.chunks)
    kept = [task for task in tasks if not task.param_name.endswith("expert_bias")]
    with _gradients_as_weights(trainer):
        yield from trainer.bridge.export_hf_weights(
            trainer.chunks, cpu=trainer.tier == "cpu", show_progress=False, conversion_tasks=kept
        )


@contextlib.contextmanager
def _gradients_as_weights(trainer: TrainerModel) -> Iterator[None]:
    parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
