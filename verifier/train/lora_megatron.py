"""LoRA on ranks, by megatron-bridge: adapters put on a loaded model, and taken from it for an engine.

What merges an adapter into its base is written apart from megatron-bridge, for the oracle.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verifier.errors import ContractError
from verifier.model.checkpoint import Checkpoint, write_shard
from verifier.model.provider_megatron import TrainerModel
from verifier.train.step_megatron import params_synced

SCALING = 2.0
"""Of every adapter, alpha over rank: not 1, so that one forgotten shows; a power of 2, so that nothing is rounded."""
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's linears that get an adapter."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


def attach(chunks: list[Any], rank: int) -> list[Any]:
    """Freeze a loaded model and put an adapter on each of its linears; they change nothing until they are trained."""
    from megatron.bridge.peft.lora import LoRA

    lora = LoRA(target_modules=list(TARGETS), dim=rank, alpha=round(SCALING * rank), dropout=0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        return lora(chunks, training=True)


def export_base(trainer: TrainerModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The frozen base under its checkpoint names, adapters left out. A collective, as `gather_megatron.export`."""
    with params_synced(trainer):
        for name, tensor in trainer.bridge.export_hf_weights(
            trainer.chunks, cpu=trainer.tier == "cpu", show_progress=False, merge_adapter_weights=False
        ):
            yield name.replace(".base_layer.", "."), tensor  # as the peft library spells what an adapter is put on


def export_adapter(trainer: TrainerModel) -> dict[str, torch.Tensor]:
    """Whole adapters on the host: NAME.lora_A.weight [rank, in] and NAME.lora_B.weight [out, rank]. A collective."""
    with params_synced(trainer):
        found = trainer.bridge.export_adapter_weights(trainer.chunks, cpu=True, show_progress=False)
        return {name: tensor.detach().clone().contiguous() for name, tensor in found}


def save_adapter(path: Path, adapter: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write a directory as the peft library does, which engines load."""
    path.mkdir()
    targets = sorted({name.removesuffix(_A).rpartition(".")[2] for name in adapter if name.endswith(_A)})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": round(SCALING * rank),
        "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    named = {f"base_model.model.{name}": tensor for name, tensor in adapter.items()}
    write_shard(path / "adapter_model.safetensors", named)


def read_adapter(path: Path) -> tuple[dict[str, torch.Tensor], float]:
    """An adapter's matrices under the names that `export_adapter` gives, and its alpha over rank, from a directory."""
    from safetensors.torch import load_file

    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    found = load_file(path / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}
    by = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]  # as the peft library scales
    return named, config["lora_alpha"] / by


def scaling_of(trainer: TrainerModel) -> float:
    """What the trainer's own adapters multiply their product by.

    Raises:
        ContractError: it has none, or they differ in it.
    """
    modules = (module for chunk in trainer.chunks for module in chunk.modules())
    found = {module.alpha / module.dim for module in modules if type(module).__name__ == "ParallelLinearAdapter"}
    if len(found) != 1:
        raise ContractError(f"the trainer's adapters have {len(found)} different scales")
    return float(found.pop())


def merged(source: Checkpoint, adapter: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint in float32, scaling * B @ A added to every matrix that has an adapter.

    Raises:
        ContractError: an adapter of a tensor that the checkpoint does not hold, or half of one.
    """
    bases = {name.removesuffix(_A) for name in adapter if name.endswith(_A)}
    for name in adapter:
        base = name.removesuffix(_A).removesuffix(_B)
        if f"{base}.weight" not in source.metas or base + _A not in adapter or base + _B not in adapter:
            raise ContractError(f"`{name}` is no half of an adapter of a tensor in the checkpoint")
    for name in source.names():
        tensor = source.read(name).float()
        base = name.removesuffix(".weight")
        if base in bases:
            tensor = tensor + SCALING * (adapter[base + _B].float() @ adapter[base + _A].float())
        yield name, tensor


def held_by_engine(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an engine that scales B once, when it loads it, must hold."""
    return {name: tensor * SCALING if name.endswith(_B) else tensor for name, tensor in adapter.items()}
