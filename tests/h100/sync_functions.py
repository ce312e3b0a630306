"""The receiving process of the transfer benchmarks, and what both of its sides are timed by."""

from __future__ import annotations

import collections
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import msgspec
import torch

from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import Digests, Pieces
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address

MOST_KERNELS = 8
"""Rows of a breakdown."""


class Spans:
    """Milliseconds that a process spends in named functions, on the host."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def over(self, **places: tuple[Any, str]) -> Iterator[None]:
        """Time calls of `owner.name` within, each under its keyword."""
        with contextlib.ExitStack() as stack:
            for label, (owner, name) in places.items():
                stack.enter_context(mock.patch.object(owner, name, self._timed(label, getattr(owner, name))))
            yield

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[label] += (time.perf_counter() - began) * 1e3

        return timed

    def rounded(self) -> dict[str, float]:
        return {label: round(spent, 2) for label, spent in self._spent.items()}


@contextlib.contextmanager
def profiled(found: dict[str, Any]) -> Iterator[None]:
    """Milliseconds and counts of the GPU's kernels within, the longest first, into `found`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
        torch.cuda.synchronize()
    rows = [row for row in profile.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA]
    rows.sort(key=lambda row: -row.self_device_time_total)
    for row in rows[:MOST_KERNELS]:
        found[row.key[:60]] = [round(row.self_device_time_total / 1e3, 3), row.count]


class NoDigests(Digests):
    """What the benchmark's own unverified transfer confirms: nothing."""

    def result(self) -> list[str]:
        return [""] * len(self._sizes)


def without_digests() -> contextlib.AbstractContextManager[Any]:
    """Within, nothing that arrives is digested."""
    return mock.patch.object(Pieces, "start", lambda self, buffer: NoDigests([], self._sizes))


def receive(conn: Connection, device: int, address: dict[str, Any], port: int) -> None:
    """Take transfers as the parent asks for them, into tensors of one's own, until it says stop."""
    torch.cuda.set_device(device)
    receiver = ChunkReceiver(0)
    receiver.connect(Address(**address))
    theirs = _vllm_group(port, device) if address["kind"] == "nccl" else None
    kept: dict[str, torch.Tensor] = {}
    gc.collect()
    gc.freeze()

    def load(tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        names = [name for name, _ in tensors]
        torch._foreach_copy_([kept[name] for name in names], [tensor for _, tensor in tensors])
        return names

    while (asked := conn.recv()) != "stop":
        what, given = asked
        if what == "plan":
            plan = ChunkPlan.from_json(given)
            kept.clear()
            kept.update(
                (meta.name, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="cuda"))
                for meta in plan.tensors
            )
        elif what == "ours":
            _ours(conn, receiver, plan, load, given)
        else:
            _unverified(what, given, plan, theirs, load)
            torch.cuda.synchronize()
            conn.send("done")
    receiver.close()


def _ours(conn: Connection, receiver: ChunkReceiver, plan: ChunkPlan, load: Any, how: str) -> None:
    """One update, from the agreement to the last receipt."""
    spans, kernels = Spans(), {}
    with contextlib.ExitStack() as stack:
        if how == "undigested":
            stack.enter_context(without_digests())
        if how == "broken down":
            group = receiver._group
            places = {
                "begin": (receiver, "agree"), "propose": (group, "propose"),
                "agree and post": (receiver, "_post_proposed"),
                "post": (group, "post"),
                "start digests": (Pieces, "start"), "load": (receiver, "_load"),
                "wait for the GPU": (receiver, "_settle"), "finish digests": (Digests, "result"),
                "receive, all of it": (receiver, "receive"),
            }  # fmt: skip
            stack.enter_context(profiled(kernels))
            stack.enter_context(spans.over(**places))
            conn.send("ready")
        receiver.agree(plan)
        for chunk in range(len(plan.chunks)):
            assert conn.recv() == chunk
            conn.send([msgspec.to_builtins(receiver.receive(chunk, load))])
    if how == "broken down":
        conn.send({"host_ms": spans.rounded(), "gpu_ms": kernels})


def _vllm_group(port: int, device: int) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine._stateless_init_process_group("127.0.0.1", port, 1, 2, device)


def _unverified(what: str, handles: Any, plan: ChunkPlan, group: Any, load: Any) -> None:
    """vLLM's own receiving half: packed broadcast, or its IPC engine."""
    if what == "vllm-nccl":
        from vllm.distributed.weight_transfer.packed_tensor import packed_broadcast_consumer

        metas = iter([(meta.name, (meta.shape, getattr(torch, meta.dtype))) for meta in plan.tensors])
        packed_broadcast_consumer(iterator=metas, group=group, src=0, post_unpack_func=load)
        return
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

    metas = list(plan.tensors)
    info = IPCWeightTransferUpdateInfo(
        names=[meta.name for meta in metas], dtype_names=[meta.dtype for meta in metas],
        shapes=[list(meta.shape) for meta in metas], ipc_handles=handles,
    )  # fmt: skip
    IPCWeightTransferEngine.receive_weights(None, info, load)
