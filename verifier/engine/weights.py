"""What a model computes with, tensor by tensor, and how it is poisoned: the part that every engine shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

_CACHES = ("kv_cache",)  # attributes that hold past requests, not weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One tensor, under its module's name and attribute."""

    name: str
    kind: str
    """ "parameter", "buffer", "view" (a buffer in a parameter's memory) or "derived"."""
    tensor: torch.Tensor


def adapter_places(module: nn.Module) -> dict[str, torch.Tensor]:
    """Where vLLM's LoRA layers keep adapters: name -> [slots, 1, rank, in] for A, [slots, 1, out, rank] for B."""
    return {
        f"{name}[{index}]": tensor
        for name in ("lora_a_stacked", "lora_b_stacked")
        for index, tensor in enumerate(module.__dict__.get(name, ()))
    }


def stored(prefix: str, module: nn.Module) -> Iterator[Held]:
    """The parameters, buffers (persistent or not) and plain tensor attributes of one module, not of its children.

    Args:
        prefix: the module's path in the model with a dot behind it, or nothing.
        module: whose tensors; those of a backend object in its attribute `impl` count as its own.
    """
    seen: set[int] = set()
    for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in members.items():
            if tensor is not None:
                seen.add(tensor.data_ptr())
                yield Held(name=prefix + name, kind=kind, tensor=tensor)
    for owner, members in (("", module.__dict__), ("impl.", vars(module.__dict__.get("impl", object)))):
        for name, value in members.items():
            if isinstance(value, torch.Tensor) and name not in _CACHES and value.data_ptr() not in seen:
                yield Held(name=f"{prefix}{owner}{name}", kind="derived", tensor=value)
    for name, tensor in adapter_places(module).items():
        yield Held(name=prefix + name, kind="derived", tensor=tensor)


def memory_of_parameters(model: nn.Module) -> set[int]:
    """Where the memory of each parameter begins."""
    return {item.untyped_storage().data_ptr() for item in model.parameters() if item.numel()}


def with_views(held: Iterable[Held], places: set[int]) -> Iterator[Held]:
    """The same; buffers in the memory of a parameter, as `memory_of_parameters` says, under the kind "view"."""
    for item in held:
        is_view = item.kind == "buffer" and item.tensor.untyped_storage().data_ptr() in places
        yield replace(item, kind="view") if is_view else item


def prefixed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its path and a dot behind it (nothing for the model itself)."""
    return ((f"{path}." if path else "", module) for path, module in model.named_modules())


def poison_stored(held: Held, carried: Collection[str], aside: dict[str, torch.Tensor]) -> str:
    """Fill one tensor with NaN, in place.

    What no checkpoint carries (RoPE tables, attention scales) is put aside first, because no update can bring it
    back; an engine that frees its memory between steps does the same with its buffers.

    Args:
        held: what to poison.
        carried: names that a checkpoint carries; parameters, and views of them, count as carried.
        aside: receives the clean contents of what is not carried; a name that is there already keeps its first.

    Returns:
        What was done, as in `Poisoned.how`.

    Source:
        vllm/v1/worker/gpu_worker.py `Worker.sleep` at level 2, which saves ``named_buffers``.
    """
    tensor = held.tensor.data
    if not tensor.is_floating_point():
        return f"left: {str(tensor.dtype).removeprefix('torch.')} has no NaN"
    if tensor.numel() == 0:
        return "left: emptied after packing"
    done = "nan"
    if held.kind in ("buffer", "derived") and held.name not in carried:
        aside.setdefault(held.name, tensor.clone())
        done = "nan, restored before the update"
    tensor.fill_(float("nan"))
    found = held.tensor if held.tensor.dtype.itemsize > 1 else held.tensor.float()  # few kernels take 8-bit floats
    return done if bool(found.isnan().all()) else "left"


def restore(model: nn.Module, aside: dict[str, torch.Tensor]) -> None:
    """Bring back, in place, what `poison_stored` put aside, and forget it."""
    for prefix, module in prefixed_modules(model):
        for held in stored(prefix, module):
            if held.name in aside:
                held.tensor.data.copy_(aside[held.name])
    aside.clear()
