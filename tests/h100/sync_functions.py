"""The receiving process of the transfer benchmarks, and what both of its sides are timed by."""

from __future__ import annotations

import collections
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import Digests, Pieces
from verifier.transport import buffer
from verifier.transport.cuda_ipc import TrainerRounds, follow, gpu_uuid
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


def filled(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    """Tensors of these names and shapes, bfloat16 on this process's GPU: the same on every GPU of a kind."""
    generator = torch.Generator("cuda").manual_seed(7)
    return [
        (name, torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator))
        for name, shape in shapes.items()
    ]


def handles_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """For each tensor, its handle by the GPU that it lies on, as vLLM's engine takes them."""
    gpu = gpu_uuid()
    return [{gpu: reduce_tensor(tensor)} for _, tensor in tensors]


def join(rank: int, count: int, store: str) -> None:
    """Join the trainer ranks, which speak by gloo."""
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)


def follow_rank_0(conn: Connection, rank: int, count: int, store: str) -> None:
    """Be a trainer rank that shows its GPU's memory to the engine rank there, until the parent says stop."""
    torch.cuda.set_device(rank)
    join(rank, count, store)
    rounds, tensors = TrainerRounds(), []
    gc.collect()
    gc.freeze()
    while (asked := conn.recv()) != "stop":
        what, given = asked
        if what == "plan":
            plan = ChunkPlan.from_json(given)
            tensors.clear()
            tensors += filled({meta.name: meta.shape for meta in plan.tensors})
        elif what == "ours":
            with without_digests_of_packed() if given == "undigested" else contextlib.nullcontext():
                follow(rounds, plan, iter(tensors))
        else:
            conn.send(handles_of(tensors))


def without_digests_of_packed() -> contextlib.AbstractContextManager[Any]:
    """Within, nothing that is packed is digested."""
    return mock.patch.object(buffer, "has_triton", return_value=False)


def receive(conn: Connection, rank: int, device: int, address: dict[str, Any], port: int) -> None:
    """Be an engine rank that takes transfers into tensors of its own, as the parent asks, until it says stop."""
    torch.cuda.set_device(device)
    receiver = ChunkReceiver(rank)
    receiver.connect(Address(**address))
    nccl = address["kind"] == "nccl"
    theirs = vllm_group(port, 1 + rank, address["world_size"], device) if nccl else None
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


def vllm_group(port: int, rank: int, world_size: int, device: int) -> Any:
    """Join vLLM's own group over NCCL; the trainer is its rank 0."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine._stateless_init_process_group("127.0.0.1", port, rank, world_size, device)


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
