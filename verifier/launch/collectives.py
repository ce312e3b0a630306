"""Torch's collectives, each written to the flight recorder as it is issued and while it is waited for.

The methods of `ProcessGroup` and `Work` themselves are wrapped, not the functions of `torch.distributed`, so that every
caller is seen, whichever alias it imported: synchronous, asynchronous, coalesced, point to point and object versions.

Source:
    torch 2.11, torch/distributed/distributed_c10d.py: every collective calls `group.<method>` and then `work.wait()`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verifier.errors import UsageError
from verifier.launch.flight_recorder import RECORDER, Entry, GroupKey, blocked, group_key, label

_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Method of `ProcessGroup` -> the function of `torch.distributed` that users know."""
_NO_GROUP = group_key("not registered with torch.distributed", ())
_keys: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], GroupKey]] = weakref.WeakKeyDictionary()
"""Keys of a group: the whole group's under (), each direction of each pair's under (source, target, tag)."""
_records: dict[int, Entry] = {}
"""The record of each Work that is under way, by its id."""


def install() -> None:
    """Wrap torch's collectives in this process; once, before a rank is forked.

    Raises:
        UsageError: this torch has no such collective.
    """
    owner = dist.ProcessGroup
    if hasattr(owner.barrier, "__wrapped__"):
        return
    if absent := [name for name in _OPS if not hasattr(owner, name)]:
        raise UsageError(
            f"torch {torch.__version__} is not supported: ProcessGroup has no `{absent[0]}` to watch; 2.11 is"
        )
    for name, op in _OPS.items():
        setattr(owner, name, _watched(getattr(owner, name), op))
    dist.Work.wait = _watched_wait(dist.Work.wait)
    for module in (dist, dist.distributed_c10d):
        module.new_group = _watched_new_group(module.new_group)


def _watched(method: Callable[..., Any], op: str) -> Callable[..., Any]:
    """Wrap a method whose first argument holds tensors, if it has tensors at all."""
    between_two = op in ("send", "recv")

    @functools.wraps(method)
    def watched(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        pair = _direction(op, group.rank(), *args[1:], **kwargs) if between_two else ()
        record = RECORDER.enter(_key(group, pair), op, *_first_tensor(args))
        work = method(group, *args, **kwargs)
        _records[id(work)] = record
        return work

    return watched


def _watched_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        RECORDER.wait(_records.pop(id(work), RECORDER.last))
        try:
            return method(work, *args, **kwargs)
        finally:
            RECORDER.leave()

    return watched


def _watched_new_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `new_group`, in which the new group's ranks wait for each other."""

    @functools.wraps(function)
    def watched(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        members = range(dist.get_world_size()) if ranks is None else ranks
        if dist.get_rank() not in members:
            return function(ranks, *args, **kwargs)
        with label(str(kwargs.get("group_desc") or "")):
            record = RECORDER.enter(group_key("new_group", members), "new_group")
            with blocked(record):
                return function(ranks, *args, **kwargs)

    return watched


def _direction(op: str, me: int, peer: int, tag: int = 0) -> tuple[int, ...]:
    return (me, peer, tag) if op == "send" else (peer, me, tag)


def _first_tensor(held: Any) -> tuple[str, torch.Size] | tuple[()]:
    while isinstance(held, (list, tuple)):
        held = held[0] if held else None
    return (_dtype_name(held.dtype), held.shape) if isinstance(held, torch.Tensor) else ()


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _key(group: dist.ProcessGroup, pair: tuple[int, ...]) -> GroupKey:
    keys = _keys.get(group)
    if keys is None:
        keys = _keys[group] = {}
    if pair not in keys:
        if group not in dist.distributed_c10d._world.pg_group_ranks:
            return _NO_GROUP
        ranks = dist.get_process_group_ranks(group)
        name = " ".join([group.group_name, *map(str, pair)])
        keys[pair] = group_key(name, [ranks[end] for end in pair[:2]] if pair else ranks)
    return keys[pair]
