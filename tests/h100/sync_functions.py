"""The receiving process of the transfer benchmarks."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address


def receive(conn: Connection, device: int, plan_json: list[Any], address: dict[str, Any], port: int) -> None:
    """Take transfers as the parent asks for them, into tensors of one's own, until it says stop."""
    torch.cuda.set_device(device)
    plan = ChunkPlan.from_json(plan_json)
    kept = {
        meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="cuda") for meta in plan.tensors
    }

    def load(tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        for name, tensor in tensors:
            kept[name].copy_(tensor)
        return [name for name, _ in tensors]

    receiver = ChunkReceiver(0)
    receiver.connect(Address(**address))
    theirs = _vllm_group(port, device) if address["kind"] == "nccl" else None
    while (asked := conn.recv()) != "stop":
        if asked == "agree":
            receiver.agree(plan)
        elif isinstance(asked, int):
            receipt = receiver.receive(asked, load)
            if asked == len(plan.chunks) - 1:
                torch.cuda.synchronize()
            conn.send([receipt.to_json()])
        else:
            _unverified(asked, plan, theirs, load)
            torch.cuda.synchronize()
            conn.send("done")
    receiver.close()


def _vllm_group(port: int, device: int) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine._stateless_init_process_group("127.0.0.1", port, 1, 2, device)


def _unverified(asked: Any, plan: ChunkPlan, group: Any, load: Any) -> None:
    """vLLM's own receiving half: packed broadcast, or its IPC engine."""
    if asked == "vllm-nccl":
        from vllm.distributed.weight_transfer.packed_tensor import packed_broadcast_consumer

        metas = iter([(meta.name, (meta.shape, getattr(torch, meta.dtype))) for meta in plan.tensors])
        packed_broadcast_consumer(iterator=metas, group=group, src=0, post_unpack_func=load)
        return
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

    metas = list(plan.tensors)
    info = IPCWeightTransferUpdateInfo(
        names=[meta.name for meta in metas], dtype_names=[meta.dtype for meta in metas],
        shapes=[list(meta.shape) for meta in metas], ipc_handles=asked,
    )  # fmt: skip
    IPCWeightTransferEngine.receive_weights(None, info, load)
