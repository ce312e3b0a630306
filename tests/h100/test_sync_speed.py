"""Verified transfers of 8 GiB against vLLM's own unverified ones, in turns, between two processes.

Verified: the sender digests what it packs, the receiver digests what arrived before it is loaded, and both are compared
within the measured time. Beside it runs our own transport without digests, so that what verification costs is told from
what the transport costs; and one more transfer is broken down, by host and by GPU, on both sides.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import socket
import statistics
import time
from dataclasses import asdict
from unittest import mock

import msgspec
import pytest
import torch

from tests.h100 import sync_functions
from tests.h100.sync_functions import Spans, profiled
from verifier.engine import sender as update
from verifier.plan.chunk_plan import TensorMeta, build_plan
from verifier.runs.spec import GPU_CHUNK_BYTES
from verifier.transport import buffer
from verifier.transport.gloo import Listener
from verifier.transport.groups import bulk_group
from verifier.transport.wire import Receipt

ROUNDS = 7
LEAST_SHARE = 0.97
"""Of the speed of vLLM's own, median of paired rounds."""


def large():
    """128 matrices of 64 MiB."""
    return {f"layers.{index}.weight": (4096, 8192) for index in range(128)}


def experts():
    """Seven layers of Qwen3-30B-A3B: thousands of matrices of 3 MiB, and norms of a few hundred bytes."""
    shapes = {}
    for layer in range(7):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (4096, 2048), f"{prefix}.self_attn.k_proj.weight": (512, 2048),
            f"{prefix}.self_attn.v_proj.weight": (512, 2048), f"{prefix}.self_attn.o_proj.weight": (2048, 4096),
            f"{prefix}.self_attn.q_norm.weight": (128,), f"{prefix}.self_attn.k_norm.weight": (128,),
            f"{prefix}.input_layernorm.weight": (2048,), f"{prefix}.post_attention_layernorm.weight": (2048,),
            f"{prefix}.mlp.gate.weight": (128, 2048),
        }  # fmt: skip
        for expert in range(128):
            for kind, shape in (("gate", (768, 2048)), ("up", (768, 2048)), ("down", (2048, 768))):
                shapes[f"{prefix}.mlp.experts.{expert}.{kind}_proj.weight"] = shape
    return shapes


class PipeEngine:
    """The engine's end of a transfer, reached by a pipe."""

    def __init__(self, conn):
        self._conn = conn

    def receive(self, chunk):
        self._conn.send(chunk)
        return lambda: self.read(self.result())

    def result(self):
        return self._conn.recv()

    def read(self, records):
        return msgspec.convert(records, list[Receipt])


class Alone:
    """The rounds of one trainer rank."""

    def exchange(self, record):
        return [record]


@pytest.fixture(scope="session")
def peer(request):
    """Another process, which moves weights by the kind that is asked for, and the ways to it."""
    with _peer(request.param) as found:
        yield request.param, *found


@contextlib.contextmanager
def _peer(kind):
    """(conn, our transfer group, vLLM's); what was imported so far is left out of garbage collection on both sides."""
    torch.cuda.set_device(0)
    listener = Listener(1, deadline_s=60, kind=kind)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    arguments = (theirs, 1 if kind == "nccl" else 0, asdict(listener.address), port)
    child = context.Process(target=sync_functions.receive, args=arguments, daemon=True)
    child.start()
    try:
        group = bulk_group(listener.accept(), Alone() if kind == "ipc" else None)
        own = _vllm_group(port) if kind == "nccl" else None
        gc.collect()
        gc.freeze()
        yield conn, group, own
        conn.send("stop")
        child.join(30)
    finally:
        gc.unfreeze()
        child.kill()


@pytest.mark.timed
@pytest.mark.parametrize("shapes", [large, experts], ids=["large", "experts"])
@pytest.mark.parametrize(
    "peer", [pytest.param("ipc", marks=pytest.mark.h100(gpus=1)), pytest.param("nccl", marks=pytest.mark.h100(gpus=2))],
    indirect=True,
)  # fmt: skip
def test_verified_against_unverified(peer, shapes, its_turn, measured):
    kind, conn, group, own = peer
    tensors = [(name, torch.randn(shape, device="cuda", dtype=torch.bfloat16)) for name, shape in shapes().items()]
    found = _compared(conn, kind, group, own, tensors, GPU_CHUNK_BYTES)
    measured(transport=kind, tensors=shapes.__name__, chunk_mib=GPU_CHUNK_BYTES >> 20, **found)
    assert found["verified_speed_share"] >= LEAST_SHARE


def _compared(conn, kind, group, own, tensors, chunk_bytes):
    """Medians of paired rounds, in GB/s, and the breakdown of one more."""
    metas = [TensorMeta(name=name, dtype="bfloat16", shape=tuple(tensor.shape)) for name, tensor in tensors]
    plan = build_plan(metas, chunk_bytes=chunk_bytes)
    num_bytes = sum(meta.num_bytes for meta in metas)
    conn.send(("plan", plan.to_json()))
    rounds = []
    for _ in range(ROUNDS + 1):
        rounds.append(
            (
                _ours(conn, group, plan, tensors, "verified"),
                _vllm(conn, kind, own, tensors),
                _ours(conn, group, plan, tensors, "undigested"),
            )
        )
    verified, vllm, undigested = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    return {
        "num_tensors": len(metas),
        "num_chunks": len(plan.chunks),
        "gib": round(num_bytes / 2**30, 2),
        "verified_gb_s": round(num_bytes / verified / 1e9, 1),
        "vllm_unverified_gb_s": round(num_bytes / vllm / 1e9, 1),
        "own_undigested_gb_s": round(num_bytes / undigested / 1e9, 1),
        "verified_speed_share": round(statistics.median(v / o for o, v, _ in rounds[1:]), 3),
        "verified_of_own_undigested": round(statistics.median(u / o for o, _, u in rounds[1:]), 3),
        "rounds_ms": [[round(1e3 * side, 2) for side in row] for row in rounds[1:]],
        "breakdown": _broken_down(conn, group, plan, tensors),
    }


def _ours(conn, group, plan, tensors, how):
    """Seconds from the agreement to the last receipt, which confirm what was planned and, if verified, its digests."""
    with contextlib.ExitStack() as stack:
        if how == "undigested":
            stack.enter_context(mock.patch.object(buffer, "_has_triton", return_value=False))
        torch.cuda.synchronize()
        began = time.perf_counter()
        conn.send(("ours", how))
        if how == "broken down":
            assert conn.recv() == "ready"
            began = time.perf_counter()
        assert group.begin(plan).reached
        for delivery in update.deliver(PipeEngine(conn), group, plan, tensors):
            (receipt,) = delivery.receipts
            assert receipt.refused is None
            planned = delivery.packed.chunk
            assert (receipt.names, receipt.dtypes, receipt.shapes) == (planned.names, planned.dtypes, planned.shapes)
            if how != "undigested":
                assert list(receipt.digests) == delivery.packed.digests()
        return time.perf_counter() - began


def _broken_down(conn, group, plan, tensors):
    """Where both processes and their GPUs spend one verified transfer; the profiler makes it slower than the others."""
    spans, kernels = Spans(), {}
    places = {
        "begin": (group, "begin"), "pack": (update._Sending, "pack_next"), "say": (group, "offer"),
        "hear and send": (update._Sending, "_send_offered"), "wait for receipts": (PipeEngine, "result"),
        "read receipts": (PipeEngine, "read"), "finish digests": (buffer.Packed, "digests"),
    }  # fmt: skip
    with profiled(kernels), spans.over(**places):
        total = _ours(conn, group, plan, tensors, "broken down")
    return {
        "total_ms": round(1e3 * total, 2),
        "sender": {"host_ms": spans.rounded(), "gpu_ms": kernels},
        "receiver": conn.recv(),
    }


def _vllm(conn, kind, group, tensors):
    """Seconds of vLLM's own transfer, which confirms nothing."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    if kind == "nccl":
        from vllm.distributed.weight_transfer.packed_tensor import packed_broadcast_producer

        conn.send(("vllm-nccl", None))
        packed_broadcast_producer(iterator=iter(tensors), group=group, src=0, post_iter_func=lambda item: item[1])
    else:
        from torch.multiprocessing.reductions import reduce_tensor

        from verifier.transport.cuda_ipc import gpu_uuid

        gpu = gpu_uuid()
        conn.send(("vllm-ipc", [{gpu: reduce_tensor(tensor)} for _, tensor in tensors]))
    assert conn.recv() == "done"
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _vllm_group(port):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine._stateless_init_process_group("127.0.0.1", port, 0, 2, 0)
