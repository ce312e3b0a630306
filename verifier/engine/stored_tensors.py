"""Tensors that a model of an engine stores: listing, poisoning and restoring, for every kind of engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from verifier.engine.api import Box, EngineSlice, EngineTensor
from verifier.plan.digest import digest_tensor
from verifier.transport.buffer import dtype_name

_CACHES = ("kv_cache",)
"""Attributes with the state of past requests, not weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a model, under its module's path and attribute."""

    name: str
    kind: str
    """See `EngineTensor.kind`."""
    tensor: torch.Tensor

    def describe(self) -> EngineTensor:
        """Return the description with the digest of the contents."""
        return EngineTensor(
            name=self.name,
            kind=self.kind,
            dtype=dtype_name(self.tensor.dtype),
            shape=tuple(self.tensor.shape),
            digest=digest_tensor(self.tensor.detach()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSlice:
    """One rank's part of one checkpoint tensor, read back from a stored tensor."""

    name: str
    holder: str
    box: Box
    tensor: torch.Tensor
    quantized: bool = False
    """True if `tensor` is the whole rounded weight that contains this part."""

    def describe(self) -> EngineSlice:
        """Return the description with the digest of the contents."""
        return EngineSlice(
            name=self.name,
            holder=self.holder,
            dtype=dtype_name(self.tensor.dtype),
            shape=tuple(self.tensor.shape),
            digest=digest_tensor(self.tensor.detach()),
            box=self.box,
            quantized=self.quantized,
        )


def whole_slice(name: str, holder: str, tensor: torch.Tensor) -> CheckpointSlice:
    """Return a slice that is the whole checkpoint tensor."""
    return CheckpointSlice(name=name, holder=holder, box=tuple((0, size) for size in tensor.shape), tensor=tensor)


def adapter_places(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return vLLM's adapter memory: name -> [slots, 1, rank, in] for A, [slots, 1, out, rank] for B."""
    return {
        f"{name}[{index}]": tensor
        for name in ("lora_a_stacked", "lora_b_stacked")
        for index, tensor in enumerate(module.__dict__.get(name, ()))
    }


def stored_in_module(prefix: str, module: nn.Module) -> Iterator[StoredTensor]:
    """Yield the parameters, buffers and plain tensor attributes of one module, without those of its children.

    Args:
        prefix: path of the module in the model with a dot behind it; empty for the model.
        module: module; tensors of a backend object in its attribute `impl` count as its own.
    """
    seen: set[int] = set()
    for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in members.items():
            if tensor is not None:
                seen.add(tensor.data_ptr())
                yield StoredTensor(name=prefix + name, kind=kind, tensor=tensor)
    for owner, members in (("", module.__dict__), ("impl.", vars(module.__dict__.get("impl", object)))):
        for name, value in members.items():
            if isinstance(value, torch.Tensor) and name not in _CACHES and value.data_ptr() not in seen:
                yield StoredTensor(name=f"{prefix}{owner}{name}", kind="derived", tensor=value)
    for name, tensor in adapter_places(module).items():
        yield StoredTensor(name=prefix + name, kind="derived", tensor=tensor)


def stored_in_model(model: nn.Module) -> Iterator[StoredTensor]:
    """Yield the stored tensors of all modules; see `stored_in_module`."""
    for prefix, module in prefixed_modules(model):
        yield from stored_in_module(prefix, module)


def parameter_storages(model: nn.Module) -> set[int]:
    """Return the address of each parameter's storage."""
    return {item.untyped_storage().data_ptr() for item in model.parameters() if item.numel()}


def with_views(stored: Iterable[StoredTensor], storages: set[int]) -> Iterator[StoredTensor]:
    """Yield stored tensors; buffers in one of `parameter_storages` get the kind "view"."""
    for item in stored:
        is_view = item.kind == "buffer" and item.tensor.untyped_storage().data_ptr() in storages
        yield replace(item, kind="view") if is_view else item


def prefixed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path with a dot behind it, module) of every module once; the model's path is empty."""
    return ((f"{path}." if path else "", module) for path, module in model.named_modules())


def poison_stored(stored: StoredTensor, carried: Collection[str], saved: dict[str, torch.Tensor]) -> str:
    """Fill one tensor with NaN, in place.

    Tensors that no checkpoint carries (RoPE tables, attention scales) are saved first, because no update restores them.
    An engine that frees its memory between steps saves its buffers too.

    Args:
        stored: tensor to poison.
        carried: names that a checkpoint carries; parameters and views of them count as carried.
        saved: name -> clean contents of tensors that are not carried; an existing entry is kept.

    Returns:
        Result as in `Poisoned.how`.

    Source:
        vllm/v1/worker/gpu_worker.py `Worker.sleep` at level 2, which saves ``named_buffers``.
    """
    tensor = stored.tensor.data
    if not tensor.is_floating_point():
        return f"left: {dtype_name(tensor.dtype)} has no NaN"
    if tensor.numel() == 0:
        return "left: emptied after packing"
    done = "nan"
    if stored.kind in ("buffer", "derived") and stored.name not in carried:
        saved.setdefault(stored.name, tensor.clone())
        done = "nan, restored before the update"
    tensor.fill_(float("nan"))
    found = stored.tensor if stored.tensor.dtype.itemsize > 1 else stored.tensor.float()
    return done if bool(found.isnan().all()) else "left"


def restore(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Restore in place what `poison_stored` saved, and clear `saved`."""
    for item in stored_in_model(model):
        if item.name in saved:
            item.tensor.data.copy_(saved[item.name])
    saved.clear()
