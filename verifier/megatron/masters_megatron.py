"""Masters and moments that a rank's optimizer holds, beside the parameters that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verifier.megatron.optimizer_megatron import master_of
from verifier.model.provider_megatron import TrainerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Part of a parameter that the rank's optimizer updates."""

    chunk: int
    local: str
    """Name of the parameter in its model chunk, without wrappers."""
    model: torch.Tensor
    held: torch.Tensor
    """Under which the optimizer keeps its state."""
    master: torch.Tensor
    """In float32; `held`, unless the optimizer keeps masters of its own."""
    offset: int
    """Index of its first element in the flattened parameter."""
    adam: Any
    group: dict[str, Any]

    @property
    def name(self) -> str:
        """Name by which the rank knows it."""
        return f"{self.local}{f' (chunk {self.chunk})' if self.chunk else ''}"

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient buffer of the whole parameter."""
        found: torch.Tensor = self.model.main_grad  # type: ignore[attr-defined]
        return found

    def moments(self) -> dict[str, torch.Tensor]:
        """Adam's state, empty before the first step."""
        found: dict[str, torch.Tensor] = self.adam.state.get(self.held, {})
        return found


def owned_masters(trainer: TrainerModel, optimizer: Any) -> Iterator[Owned]:
    """Masters that a rank's optimizer holds, on the device or on the host; without Megatron-FSDP."""
    names = {
        id(parameter): (at, name.replace("module.", ""))
        for at, chunk in enumerate(trainer.chunks) for name, parameter in chunk.named_parameters()
    }  # fmt: skip
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        models = models_of(part)
        for group in part.optimizer.param_groups:
            for held in group["params"]:
                model = models.get(id(held))
                if model is None or id(model) not in names or held.numel() == 0:
                    continue
                sharded = hasattr(part, "model_param_group_index_map")
                offset = part._get_model_param_range_map(model)["param"].start if sharded else 0
                chunk, local = names[id(model)]
                yield Owned(
                    chunk=chunk, local=local, model=model, held=held, master=master_of(part.optimizer, held),
                    offset=offset, adam=part.optimizer, group=group,
                )  # fmt: skip


def models_of(part: Any) -> dict[int, torch.Tensor]:
    """Id of each tensor in the groups of an optimizer's part -> the model's parameter; none where not known."""
    if hasattr(part, "model_param_group_index_map"):
        places = part.model_param_group_index_map.items()
        return {id(part.optimizer.param_groups[group]["params"][at]): model for model, (group, at) in places}
    if hasattr(part, "float16_groups"):
        models = [*part.float16_groups, *part.fp32_from_fp32_groups]
        masters = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
        return {
            id(master): model
            for ours, theirs in zip(masters, models, strict=True)
            for master, model in zip(ours, theirs, strict=True)
        }
    return {id(item): item for group in part.optimizer.param_groups for item in group["params"]}
