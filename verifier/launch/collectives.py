"""Torch's collectives, each written to the flight recorder as it is issued and while it is waited for.

The methods of `ProcessGroup` and `Work` themselves are wrapped, not the functions of `torch.distributed`, so that every
caller is seen, whichever alias it imported: synchronous, asynchronous, coalesced, point to point and object versions.
Outside of a rank the wrappers only pass through.

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
from verifier.launch import flight_recorder as flight

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
}
_NO_DTYPE = b""
_NO_GROUP = flight.group_key("not registered with torch.distributed", ())


def install() -> None:
    """Wrap torch's collectives in this process; once, before a rank is forked.

    Raises:
        UsageError: this torch has no such collective.
    """
    owner = dist.ProcessGroup
    if hasattr(owner.barrier, "__wrapped__"):
        return
    absent = [name for name in (*_OPS, "send", "recv") if not hasattr(owner, name)]
    if absent:
        raise UsageError(
            f"torch {torch.__version__} is not supported: ProcessGroup has no `{absent[0]}` to watch; 2.11 is"
        )
    watch = _Watch()
    for name, op in _OPS.items():
        setattr(owner, name, watch.collective(getattr(owner, name), op.encode()))
    owner.send = watch.point_to_point(owner.send, b"send")
    owner.recv = watch.point_to_point(owner.recv, b"recv")
    dist.Work.wait = watch.waiting(dist.Work.wait)
    for module in (dist, dist.distributed_c10d):
        module.new_group = _watched_new_group(module.new_group)


class _Watch:
    """The wrappers and what they share: keys of groups, and the record of each Work that is under way."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, flight.GroupKey] = weakref.WeakKeyDictionary()
        self._pairs: dict[tuple[str, int, int, int], flight.GroupKey] = {}
        self._records: dict[int, flight.Record] = {}
        self._dtypes: dict[torch.dtype, bytes] = {}

    def collective(self, method: Callable[..., Any], op: bytes) -> Callable[..., Any]:
        """Wrap a method whose first argument holds tensors, if it has tensors at all."""

        @functools.wraps(method)
        def watched(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
            recorder = flight.active()
            if recorder is None:
                return method(group, *args, **kwargs)
            record = self._enter(recorder, self._group(group), op, args[0] if args else None)
            work = method(group, *args, **kwargs)
            self._records[id(work)] = record
            return work

        return watched

    def point_to_point(self, method: Callable[..., Any], op: bytes) -> Callable[..., Any]:
        """Wrap `send` or `recv` (tensors, peer, tag): each direction of each pair of ranks counts on its own."""

        @functools.wraps(method)
        def watched(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
            recorder = flight.active()
            if recorder is None:
                return method(group, tensors, peer, tag)
            me = group.rank()
            source, target = (me, peer) if op == b"send" else (peer, me)
            name = (group.group_name, source, target, tag)
            key = self._pairs.get(name)
            if key is None:
                ranks = _global_ranks(group)
                text = f"{group.group_name} {source} to {target} tag {tag}"
                key = flight.group_key(text, (ranks[source], ranks[target])) if ranks else _NO_GROUP
                self._pairs[name] = key
            record = self._enter(recorder, key, op, tensors)
            work = method(group, tensors, peer, tag)
            self._records[id(work)] = record
            return work

        return watched

    def waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Work.wait`."""

        @functools.wraps(method)
        def watched(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            recorder = flight.active()
            if recorder is None:
                return method(work, *args, **kwargs)
            recorder.wait(self._records.pop(id(work), recorder.last))
            try:
                return method(work, *args, **kwargs)
            finally:
                recorder.leave()

        return watched

    def _enter(self, recorder: flight.FlightRecorder, key: flight.GroupKey, op: bytes, tensors: Any) -> flight.Record:
        while type(tensors) is list:
            tensors = tensors[0] if tensors else None
        if not isinstance(tensors, torch.Tensor):
            return recorder.enter(key, op, _NO_DTYPE, None)
        dtype = self._dtypes.get(tensors.dtype) or self._dtype(tensors.dtype)
        return recorder.enter(key, op, dtype, tensors.shape)

    def _dtype(self, dtype: torch.dtype) -> bytes:
        name = self._dtypes[dtype] = str(dtype).removeprefix("torch.").encode()
        return name

    def _group(self, group: dist.ProcessGroup) -> flight.GroupKey:
        key = self._groups.get(group)
        if key is None:
            ranks = _global_ranks(group)
            if not ranks:
                return _NO_GROUP
            key = self._groups[group] = flight.group_key(group.group_name, ranks)
        return key


def _global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Global ranks in group order; empty for a group that torch.distributed does not know."""
    known = dist.distributed_c10d._world.pg_group_ranks
    return dist.get_process_group_ranks(group) if group in known else []


def _watched_new_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `new_group`, in which the new group's ranks wait for each other."""

    @functools.wraps(function)
    def watched(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        members = range(dist.get_world_size()) if ranks is None else ranks
        if flight.active() is None or dist.get_rank() not in members:
            return function(ranks, *args, **kwargs)
        waiting = flight.blocked(flight.group_key("new_group", members), b"new_group")
        with flight.label(str(kwargs.get("group_desc") or "")), waiting:
            return function(ranks, *args, **kwargs)

    return watched
