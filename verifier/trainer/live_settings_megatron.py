"""Settings of the live Megatron objects of a rank, and the options that they are built with."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from verifier.config.megatron import MegatronOptions
from verifier.model.provider_megatron import DataParallel, FullySharded, TrainerModel
from verifier.trainer.upstream_fields import Part


def data_parallel_of(options: MegatronOptions) -> DataParallel:
    """Return the options of data parallelism that a config asks for."""
    return DataParallel(
        distributed_optimizer=options.distributed_optimizer, overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather, grad_reduce_in_fp32=options.grad_reduce_in_fp32,
        bucket_size=options.bucket_size, offload=options.optimizer_offload,
        overlap_offload=options.overlap_optimizer_offload, fsdp=_fsdp_of(options),
    )  # fmt: skip


def _fsdp_of(options: MegatronOptions) -> FullySharded | None:
    if not options.use_fsdp:
        return None
    return FullySharded(
        sharding=options.fsdp_sharding, prefetch=options.fsdp_prefetch,
        unit_elements=options.fsdp_unit_elements,
    )  # fmt: skip


def settings_of(trainer: TrainerModel, optimizer: Any, scheduler: Any) -> dict[Part, list[Any]]:
    """Return the live objects that hold settings, each once: layers may have copies of the model's config."""
    modules = [module for chunk in trainer.chunks for module in chunk.modules()]
    configs = {id(item): item for module in modules if hasattr(item := getattr(module, "config", None), "num_layers")}
    groups = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
    return {
        "model": list(configs.values()), "ddp": [chunk.ddp_config for chunk in trainer.chunks],
        "optimizer": [part.config for part in optimizer.chained_optimizers],
        "adam": [
            SimpleNamespace(beta_1=group["betas"][0], beta_2=group["betas"][1], eps=group["eps"]) for group in groups
        ],
        "scheduler": [scheduler], "adapter": _adapters_of(trainer),
    }  # fmt: skip


def effective_settings(trainer: TrainerModel, optimizer: Any) -> dict[str, Any]:
    """Return plain fields of the transformer config, of data parallelism and of the optimizer that a rank runs with."""
    parts = {"model": trainer.provider, "ddp": trainer.chunks[0].ddp_config, "optimizer": optimizer.config}
    return {name: _plain(part) for name, part in parts.items()}


def _plain(part: Any) -> dict[str, Any]:
    """Fields of a dataclass that are numbers, flags, texts or dtypes."""
    values = {item.name: getattr(part, item.name, None) for item in dataclasses.fields(part)}
    return {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in values.items()
        if isinstance(value, int | float | str | torch.dtype | None)
    }


def _adapters_of(trainer: TrainerModel) -> list[Any]:
    """Rank and alpha of every adapter of a rank, and the names of the linears that have one."""
    named = [item for chunk in trainer.chunks for item in chunk.named_modules()]
    found = {name.split(".")[-2]: module for name, module in named if type(module).__name__ == "ParallelLinearAdapter"}
    return [
        SimpleNamespace(dim=module.dim, alpha=module.alpha, targets=sorted(found))
        for name, module in named
        if type(module).__name__ == "ParallelLinearAdapter"
    ]
