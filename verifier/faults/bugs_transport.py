"""Bugs of the transport: bytes from trainer to engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced


@contextlib.contextmanager
def _router_rounded(fired: Fired) -> Iterator[None]:
    import torch

    def make(original: Any) -> Any:
        def pack(chunk: Any, tensors: Any, into: Any) -> Any:
            sent = dict(tensors)
            for name, tensor in sent.items():
                if name.endswith(".mlp.gate.weight"):
                    fired()
                    sent[name] = tensor.to(torch.bfloat16).to(tensor.dtype)
            return original(chunk, sent, into)

        return pack

    with replaced("verifier.engine.sender:pack", "chunk, tensors, into", make):
        yield


@contextlib.contextmanager
def _bytes_under_wrong_names(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def pack(chunk: Any, tensors: Any, into: Any) -> Any:
            sent = dict(tensors)
            first, second = (f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (4, 5))
            if first in sent and second in sent:
                fired()
                sent[first], sent[second] = sent[second], sent[first]
            return original(chunk, sent, into)

        return pack

    with replaced("verifier.engine.sender:pack", "chunk, tensors, into", make):
        yield


@contextlib.contextmanager
def _buffer_freed(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def broadcast(self: Any, buffer: Any, what: str) -> Any:
            if self.rank == 0 and what.startswith("chunk 1 "):
                fired()
                buffer = buffer.clone()
                buffer[-256:] = 0
            return original(self, buffer, what)

        return broadcast

    with replaced("verifier.transport.gloo:GlooGroup.broadcast", "self, buffer, what", make):
        yield


@contextlib.contextmanager
def _buffer_of_last_version(fired: Fired) -> Iterator[None]:
    earlier: dict[str, Any] = {}

    def make(original: Any) -> Any:
        def broadcast(self: Any, buffer: Any, what: str) -> Any:
            sent = buffer
            if self.rank == 0 and what.startswith("chunk 1 "):
                if what in earlier:
                    fired()
                    sent = earlier[what]
                earlier[what] = buffer
            return original(self, sent, what)

        return broadcast

    with replaced("verifier.transport.gloo:GlooGroup.broadcast", "self, buffer, what", make):
        yield


@contextlib.contextmanager
def _received_in_another_order(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def unpack(chunk: Any, buffer: Any) -> Any:
            found = dict(original(chunk, buffer))
            first, second = (f"model.layers.2.self_attn.{part}_proj.weight" for part in "kv")
            if first in found and second in found:
                fired()
                found[first], found[second] = found[second], found[first]
            return list(found.items())

        return unpack

    with replaced("verifier.transport.receiver:unpack", "chunk, buffer", make):
        yield


@contextlib.contextmanager
def _sync_gated_off(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def transfer(engine: Any, group: Any, plan: Any, tensors: Any, watch: Any, share: Any = None) -> str:
            if watch.version < 2:
                return str(original(engine, group, plan, tensors, watch, share))
            fired()
            return ""

        return transfer

    with replaced("verifier.engine.sender:transfer", "engine, group, plan, tensors, watch, share", make):
        yield


FAULTS = (
    Fault(
        id="router-rounded-on-the-wire",
        stage=Stage.TRANSPORT,
        reproduces="PrimeIntellect-ai/prime-rl#3524",
        summary="routers pass through bf16 on the sender's side and arrive in their own dtype, with fewer bits",
        caught_by=("TPT001", "ENG002"),
        inject=_router_rounded,
    ),
    Fault(
        id="bytes-under-wrong-names",
        stage=Stage.TRANSPORT,
        reproduces="NovaSky-AI/SkyRL#1581",
        summary="two experts' up projections, which have one shape, change places between metadata and bytes",
        caught_by=("TPT001", "ENG002"),
        inject=_bytes_under_wrong_names,
    ),
    Fault(
        id="send-buffer-freed-early",
        stage=Stage.TRANSPORT,
        reproduces="THUDM/slime#929",
        summary="the end of one buffer is overwritten before the receiver has read it",
        caught_by=("TPT001", "ENG002"),
        inject=_buffer_freed,
    ),
    Fault(
        id="buffer-of-last-version-sent",
        stage=Stage.TRANSPORT,
        reproduces="NVIDIA-NeMo/RL#3651 (found in review)",
        summary="one buffer still holds the version before, and is sent as the new one",
        caught_by=("TPT001",),
        inject=_buffer_of_last_version,
    ),
    Fault(
        id="sync-gated-off",
        stage=Stage.TRANSPORT,
        reproduces="verl-project/verl#4248",
        summary="a flag skips the transfer after the first: the engine keeps the weights that it has",
        caught_by=("TPT002", "LGP002"),
        inject=_sync_gated_off,
    ),
    Fault(
        id="received-in-another-order",
        stage=Stage.TRANSPORT,
        reproduces="NovaSky-AI/SkyRL#1581",
        summary="the receiver cuts its buffer by metadata of another order, which takes keys for values in one layer",
        caught_by=("TPT001", "ENG001"),
        inject=_received_in_another_order,
        side=Side.ENGINE,
        model="tiny:qwen3",
    ),
)
