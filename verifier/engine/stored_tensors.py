"""Tensors that a model of an engine stores: listing, poisoning and restoring, for every kind of engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verifier.engine.api import EngineSlice, EngineTensor, Poisoned
from verifier.plan.digest import digest_tensor, dtype_name

_ADAPTERS = ("lora_a_stacked", "lora_b_stacked")
_NOT_WEIGHTS = frozenset(vars(nn.Module())) | {"kv_cache", *_ADAPTERS}
"""Attributes with what torch keeps of a module, with the state of past requests, and with what `adapter_places` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a model, under its module's path and attribute."""

    name: str
    kind: str
    """See `EngineTensor.kind`."""
    tensor: torch.Tensor

    def describe(self) -> EngineTensor:
        """Return the description with the digest of the contents."""
        return EngineTensor(name=self.name, kind=self.kind, **_contents(self.tensor))


def slice_of(
    name: str, holder: str, tensor: torch.Tensor, dim: int = 0, begin: int = 0, *, quantized: bool = False
) -> EngineSlice:
    """Describe one rank's part of a checkpoint tensor: all of it, but in one dim a run from `begin`.

    If `quantized`, `tensor` is the whole rounded weight that contains the part, and nothing is said about its place.
    """
    sizes = [] if quantized else tensor.shape
    box = tuple((begin, begin + size) if at == dim else (0, size) for at, size in enumerate(sizes))
    return EngineSlice(name=name, holder=holder, box=box, quantized=quantized, **_contents(tensor))


def _contents(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": dtype_name(tensor.dtype), "shape": tuple(tensor.shape), "digest": digest_tensor(tensor.detach())
    }  # fmt: skip


def adapter_places(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return vLLM's adapter memory: name -> [slots, 1, rank, in] for A, [slots, 1, out, rank] for B."""
    return {
        f"{name}[{index}]": tensor for name in _ADAPTERS for index, tensor in enumerate(module.__dict__.get(name, ()))
    }


def stored_in_model(model: nn.Module) -> Iterator[StoredTensor]:
    """Yield the parameters, buffers and plain tensor attributes of all modules, and of backends in their `impl`.

    Attributes of parameters count too, and lists, tuples and dicts of tensors: caches of what was made of a weight.
    """
    parameters = {item.untyped_storage().data_ptr() for item in model.parameters() if item.numel()}
    for prefix, module in prefixed_modules(model):
        seen: set[int] = set()
        for kind, own in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in own.items():
                if tensor is not None:
                    seen.add(tensor.data_ptr())
                    is_view = kind == "buffer" and tensor.untyped_storage().data_ptr() in parameters
                    yield StoredTensor(name=prefix + name, kind="view" if is_view else kind, tensor=tensor)
        for path, value in _attributes(module):
            if isinstance(value, torch.Tensor):
                if value.data_ptr() not in seen:
                    yield StoredTensor(name=prefix + path, kind="derived", tensor=value)
                continue
            for at, tensor in _held(value):
                if tensor.data_ptr() not in seen and tensor.untyped_storage().data_ptr() not in parameters:
                    yield StoredTensor(name=f"{prefix}{path}[{at}]", kind="derived", tensor=tensor)
        for name, tensor in adapter_places(module).items():
            yield StoredTensor(name=prefix + name, kind="derived", tensor=tensor)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, value) of every attribute of a module, of its backend and of its parameters that may hold tensors."""
    owners = {"": module, "impl.": module.__dict__.get("impl", object)}
    owners |= {f"{name}.": item for name, item in module._parameters.items() if item is not None}
    for owner, holder in owners.items():
        for name, value in vars(holder).items():
            if name not in _NOT_WEIGHTS:
                yield owner + name, value


def _held(value: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return ((at, item) for at, item in pairs if isinstance(item, torch.Tensor))


def prefixed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path with a dot behind it, module) of every module once; the model's path is empty."""
    return ((f"{path}." if path else "", module) for path, module in model.named_modules())


def poison_stored(stored: StoredTensor, carried: Collection[str], saved: dict[str, torch.Tensor]) -> Poisoned:
    """Fill one tensor with NaN, in place.

    A tensor that no checkpoint carries (RoPE tables, attention scales) is saved first, unless it was before, because no
    update restores it; parameters and views of them count as carried. An engine that frees its memory between steps
    saves its buffers too.

    Source:
        vllm/v1/worker/gpu_worker.py `Worker.sleep` at level 2, which saves ``named_buffers``.
    """
    tensor, how = stored.tensor.data, "nan"
    if not tensor.is_floating_point():
        how = f"left: {dtype_name(tensor.dtype)} has no NaN"
    elif tensor.numel() == 0:
        how = "left: emptied after packing"
    else:
        if stored.kind in ("buffer", "derived") and stored.name not in carried:
            saved.setdefault(stored.name, tensor.clone())
            how = "nan, restored before the update"
        tensor.fill_(float("nan"))
        found = stored.tensor if stored.tensor.dtype.itemsize > 1 else stored.tensor.float()
        if not bool(found.isnan().all()):
            how = "left"
    return Poisoned(name=stored.name, how=how)


def restore(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Restore in place what `poison_stored` saved, and clear `saved`."""
    for item in stored_in_model(model):
        if item.name in saved:
            item.tensor.data.copy_(saved[item.name])
    saved.clear()
