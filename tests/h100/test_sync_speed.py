"""Verified transfers of 8 GiB against vLLM's own unverified ones, in turns, between two processes."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time

import pytest
import torch

from tests.h100 import sync_functions
from verifier.engine import update
from verifier.plan.chunk_plan import TensorMeta, build_plan
from verifier.transport.gloo import Listener
from verifier.transport.groups import over

TENSOR_SHAPE = (4096, 8192)
NUM_TENSORS = 128
CHUNK_BYTES = 1 << 30
ROUNDS = 5


class PipeEngine:
    """The engine's end of a transfer, reached by a pipe."""

    def __init__(self, conn):
        self._conn = conn

    def receive(self, chunk):
        self._conn.send(chunk)
        return self

    def result(self):
        return self._conn.recv()


@pytest.mark.parametrize(
    "kind",
    [pytest.param("ipc", marks=pytest.mark.h100(gpus=1)), pytest.param("nccl", marks=pytest.mark.h100(gpus=2))],
)
def test_verified_against_unverified(kind, measured):
    torch.cuda.set_device(0)
    tensors = [
        (f"layers.{index}.weight", torch.randn(TENSOR_SHAPE, device="cuda", dtype=torch.bfloat16))
        for index in range(NUM_TENSORS)
    ]
    metas = [TensorMeta(name=name, dtype="bfloat16", shape=TENSOR_SHAPE) for name, _ in tensors]
    plan = build_plan(metas, chunk_bytes=CHUNK_BYTES)
    num_bytes = sum(meta.num_bytes for meta in metas)
    listener = Listener(1, deadline_s=60, kind=kind)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    device = 1 if kind == "nccl" else 0
    arguments = (theirs, device, plan.to_json(), listener.address.to_json(), port)
    child = context.Process(target=sync_functions.receive, args=arguments, daemon=True)
    child.start()
    try:
        group = over(listener.accept(), lambda record: [record])
        own = _vllm_group(port) if kind == "nccl" else None
        pairs = []
        for _ in range(ROUNDS + 1):
            pairs.append((_verified(conn, group, plan, tensors), _unverified(conn, kind, own, tensors)))
        conn.send("stop")
        child.join(30)
    finally:
        child.kill()
    verified, unverified = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
    share = statistics.median(theirs / ours for ours, theirs in pairs[1:])
    measured(
        transport=kind, gib=round(num_bytes / 2**30, 1), verified_gb_s=round(num_bytes / verified / 1e9, 1),
        vllm_unverified_gb_s=round(num_bytes / unverified / 1e9, 1), verified_speed_share=round(share, 3),
    )  # fmt: skip


def _vllm_group(port):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine._stateless_init_process_group("127.0.0.1", port, 0, 2, 0)


def _verified(conn, group, plan, tensors):
    """Seconds from the agreement to the last receipt; every chunk is confirmed by what arrived."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    conn.send("agree")
    assert group.agree(plan.digest).reached
    for delivery in update.deliver(PipeEngine(conn), group, plan, tensors):
        assert [item.name for item in delivery.receipts[0].received] == [
            entry.tensor.name for entry in delivery.chunk.entries
        ]
    return time.perf_counter() - began


def _unverified(conn, kind, group, tensors):
    torch.cuda.synchronize()
    began = time.perf_counter()
    if kind == "nccl":
        from vllm.distributed.weight_transfer.packed_tensor import packed_broadcast_producer

        conn.send("vllm-nccl")
        packed_broadcast_producer(iterator=iter(tensors), group=group, src=0, post_iter_func=lambda item: item[1])
    else:
        from torch.multiprocessing.reductions import reduce_tensor

        from verifier.transport.cuda_ipc import gpu_uuid

        conn.send([{gpu_uuid(): reduce_tensor(tensor)} for _, tensor in tensors])
    assert conn.recv() == "done"
    torch.cuda.synchronize()
    return time.perf_counter() - began
