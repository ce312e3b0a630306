"""What a vLLM rank computes with: its state for comparison with a cold engine, its poison, and what survives it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from verifier.engine.packed_vllm import packed_linears, poison_packed

_CACHES = ("kv_cache",)  # attributes that hold past requests, not weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One tensor, under its module's name and attribute."""

    name: str
    kind: str
    tensor: torch.Tensor


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """Every parameter, buffer and plain tensor attribute of the model, as stored; packed linears as what they multiply by.

    Parameters that vLLM emptied after packing are yielded too, with their shape of zero elements.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        yield from _stored(prefix, module)
        for packed in packed_linears(module):
            yield Held(name=prefix + packed.holder, kind="derived", tensor=packed.read())


def poison_model(model: nn.Module, carried: Collection[str]) -> tuple[list[tuple[str, str]], dict[str, torch.Tensor]]:
    """Fill with NaN everything that a forward pass reads.

    What no checkpoint carries (RoPE tables, attention scales) is put aside first, as vLLM's sleep level 2 puts
    buffers aside, because no update can bring it back.

    Args:
        model: vLLM's.
        carried: names that a checkpoint carries.

    Returns:
        (name, what was done) of each tensor, and what was put aside, by name.

    Source:
        vllm/v1/worker/gpu_worker.py `Worker.sleep`, which saves ``named_buffers``.
    """
    done: list[tuple[str, str]] = []
    aside: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for held in _stored(prefix, module):
            if not held.tensor.is_floating_point():
                done.append((held.name, f"left: {held.tensor.dtype} has no NaN"))
            elif held.tensor.numel() == 0:
                done.append((held.name, "left: emptied by vLLM after packing"))
            elif held.kind == "parameter" or held.name in carried:
                held.tensor.data.fill_(float("nan"))
                done.append((held.name, "nan"))
            else:
                aside[held.name] = held.tensor.data.clone()
                held.tensor.data.fill_(float("nan"))
                done.append((held.name, "nan, restored before the update"))
        done.extend((prefix + holder, how) for holder, how in poison_packed(module))
    return done, aside


def restore(model: nn.Module, aside: dict[str, torch.Tensor]) -> None:
    """Bring back, in place, what `poison_model` put aside."""
    for path, module in model.named_modules():
        for held in _stored(f"{path}." if path else "", module):
            if held.name in aside:
                held.tensor.data.copy_(aside[held.name])


def _stored(prefix: str, module: nn.Module) -> Iterator[Held]:
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
