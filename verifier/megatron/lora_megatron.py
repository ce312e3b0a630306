"""LoRA on ranks, by megatron-bridge: attaching adapters to a loaded model and exporting them for an engine."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verifier.errors import ContractError
from verifier.megatron.step_megatron import params_synced
from verifier.model.checkpoint import write_shard
from verifier.model.provider_megatron import TrainerModel

SCALING = 2.0
"""Alpha over rank of a round trip's adapters: not 1, so a forgotten scaling shows, and a power of 2, so it is exact."""
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Last names of Megatron's linears that can get an adapter."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIX = "base_model.model."
"""Beginning of every name in an adapter's file."""
SKIPPED = "skipped: "
"""Beginning of the name of a matrix that a reader skips."""
_READ = {"r", "lora_alpha", "use_rslora", "target_modules"}
"""Keys of an adapter's configuration that `read_adapter` follows."""
_NOT_OF_THE_ADAPTER = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "init_lora_weights", "megatron_core", "qalora_group_size",
}  # fmt: skip
"""Keys that change nothing of what a reader makes of an adapter's matrices, whatever they say."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Adapters of a model."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = TARGETS
    """Last names of Megatron's linears that get one."""

    @property
    def scaling(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / self.rank


def attach(chunks: list[Any], lora: LoraSpec) -> list[Any]:
    """Freeze a loaded model and attach an adapter, initially zero, to each linear that the spec names."""
    from megatron.bridge.peft.lora import LoRA

    peft = LoRA(target_modules=list(lora.targets), dim=lora.rank, alpha=lora.alpha, dropout=0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        adapted: list[Any] = peft(chunks, training=True)
    for chunk in adapted:
        embedding = getattr(chunk, "embedding", None)  # of the first stage; later ones receive what has a gradient
        if chunk.config.recompute_granularity == "selective" and embedding is not None:
            embedding.register_forward_hook(_on_embedding)
    return adapted


def _on_embedding(module: Any, given: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Return what a frozen embedding gives, as a tensor with a gradient.

    A recomputed module runs its backward pass only if an input of it has one, and frozen layers before it make none.
    megatron-bridge does so for whole layers alone (`maybe_enable_recompute_inputs_grad`).
    """
    if embedded.requires_grad or not torch.is_grad_enabled():
        return embedded
    return embedded.detach().requires_grad_()


def export_base(trainer: TrainerModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the frozen base under its checkpoint names, without adapters. A collective, as `gather_megatron.export`."""
    with params_synced(trainer):
        for name, tensor in trainer.bridge.export_hf_weights(
            trainer.chunks, cpu=trainer.tier == "cpu", show_progress=False, merge_adapter_weights=False
        ):
            yield name.replace(".base_layer.", "."), tensor  # the peft library's prefix


def export_adapter(trainer: TrainerModel) -> dict[str, torch.Tensor]:
    """Return adapters on the host: NAME.lora_A.weight [rank, in], NAME.lora_B.weight [out, rank]. A collective."""
    with params_synced(trainer):
        found = trainer.bridge.export_adapter_weights(trainer.chunks, cpu=True, show_progress=False)
        return {name: tensor.detach().clone().contiguous() for name, tensor in found}


def save_adapter(path: Path, adapter: Mapping[str, torch.Tensor], lora: LoraSpec) -> None:
    """Write an adapter directory in the format of the peft library, which engines load."""
    path.mkdir()
    targets = sorted({name.removesuffix(_A).rpartition(".")[2] for name in adapter if name.endswith(_A)})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
        "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    named = {f"{_PREFIX}{name}": tensor for name, tensor in adapter.items()}
    write_shard(path / "adapter_model.safetensors", named)


def read_adapter(path: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Read a directory; return the matrices under the names of `export_adapter`, and alpha over rank.

    As the peft library does, which skips matrices of modules that the configuration does not name, and those whose
    names do not begin as its own do: here these have `SKIPPED` before their names.
    """
    from safetensors.torch import load_file

    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    found = load_file(path / "adapter_model.safetensors")
    targets = tuple(f".{name}{half}" for name in config["target_modules"] for half in (_A, _B))
    named = {
        name.removeprefix(_PREFIX) if name.startswith(_PREFIX) and name.endswith(targets) else SKIPPED + name: tensor
        for name, tensor in found.items()
    }
    by = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]  # as the peft library scales
    return named, config["lora_alpha"] / by


def further_settings(path: Path) -> dict[str, str]:
    """Read what the configuration of a directory asks of a reader beyond `read_adapter`; empty for a plain adapter.

    The peft library has patterns of alpha and rank, layers, excluded modules, dropout, DoRA and more; where they are
    off, they are null, false, zero, "none" or empty.
    """
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    plain = {"peft_type": "LORA", "bias": "none"}
    return {
        key: json.dumps(value) for key, value in config.items()
        if key not in _READ | _NOT_OF_THE_ADAPTER and value and value != plain.get(key)
    }  # fmt: skip


def scaling_of(trainer: TrainerModel) -> float:
    """Return the scaling of the trainer's adapters.

    Raises:
        ContractError: there are no adapters, or their scalings differ.
    """
    modules = (module for chunk in trainer.chunks for module in chunk.modules())
    found = {module.alpha / module.dim for module in modules if type(module).__name__ == "ParallelLinearAdapter"}
    if len(found) != 1:
        raise ContractError(f"the trainer's adapters have {len(found)} different scales")
    return float(found.pop())


def held_by_engine(adapter: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """Return the adapter as an engine stores it that scales B once, when it loads it."""
    return {name: tensor * scaling if name.endswith(_B) else tensor for name, tensor in adapter.items()}
