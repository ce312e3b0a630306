"""Bugs of the transport: bytes from trainer to engine."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FireCounter, Side, fault

PACK = "verifier.engine.sender:pack(chunk, tensors, into)"
BROADCAST = "verifier.transport.gloo:GlooGroup.broadcast(self, buffer, what)"


def _swap(tensors: dict[str, Any], first: str, second: str) -> bool:
    """Swap two tensors if both are there."""
    if first not in tensors or second not in tensors:
        return False
    tensors[first], tensors[second] = tensors[second], tensors[first]
    return True


@fault(
    PACK, id="router-rounded-on-the-wire", stage=Stage.TRANSPORT, reproduces="PrimeIntellect-ai/prime-rl#3524",
    caught_by=("TPT001", "ENG002"),
)  # fmt: skip
def router_rounded_on_the_wire(original: Any, fire: FireCounter, chunk: Any, tensors: Any, into: Any) -> Any:
    """Routers pass through bf16 on the sender's side and arrive in their own dtype, with fewer bits."""
    import torch

    sent = dict(tensors)
    for name, tensor in sent.items():
        if name.endswith(".mlp.gate.weight"):
            fire()
            sent[name] = tensor.to(torch.bfloat16).to(tensor.dtype)
    return original(chunk, sent, into)


@fault(
    PACK, id="bytes-under-wrong-names", stage=Stage.TRANSPORT, reproduces="NovaSky-AI/SkyRL#1581",
    caught_by=("TPT001", "ENG002"),
)  # fmt: skip
def bytes_under_wrong_names(original: Any, fire: FireCounter, chunk: Any, tensors: Any, into: Any) -> Any:
    """Two experts' up projections, which have one shape, change places between metadata and bytes."""
    sent = dict(tensors)
    if _swap(sent, *(f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (4, 5))):
        fire()
    return original(chunk, sent, into)


@fault(
    BROADCAST, id="send-buffer-freed-early", stage=Stage.TRANSPORT, reproduces="THUDM/slime#929",
    caught_by=("TPT001", "ENG002"),
)  # fmt: skip
def send_buffer_freed_early(original: Any, fire: FireCounter, self: Any, buffer: Any, what: str) -> Any:
    """The end of one buffer is overwritten before the receiver has read it."""
    if self.rank == 0 and what.startswith("chunk 1 "):
        fire()
        buffer = buffer.clone()
        buffer[-256:] = 0
    return original(self, buffer, what)


@fault(
    BROADCAST, id="buffer-of-last-version-sent", stage=Stage.TRANSPORT,
    reproduces="NVIDIA-NeMo/RL#3651 (found in review)", caught_by=("TPT001",),
)  # fmt: skip
def buffer_of_last_version_sent(original: Any, fire: FireCounter, self: Any, buffer: Any, what: str) -> Any:
    """One buffer still holds the version before, and is sent as the new one."""
    sent = buffer
    if self.rank == 0 and what.startswith("chunk 1 "):
        if what in fire.state:
            fire()
            sent = fire.state[what]
        fire.state[what] = buffer
    return original(self, sent, what)


@fault(
    "verifier.engine.sender:transfer(engine, group, plan, tensors, watch, rounds)",
    id="sync-gated-off", stage=Stage.TRANSPORT, reproduces="verl-project/verl#4248", caught_by=("TPT002", "LGP002"),
)  # fmt: skip
def sync_gated_off(original: Any, fire: FireCounter, *args: Any) -> Any:
    """A flag skips the transfer after the first: the engine keeps the weights that it has."""
    if args[4].version < 2:
        return original(*args)
    fire()
    return ""


@fault(
    "verifier.transport.receiver:unpack(chunk, buffer)",
    id="received-in-another-order", stage=Stage.TRANSPORT, reproduces="NovaSky-AI/SkyRL#1581",
    caught_by=("TPT001", "ENG001"), side=Side.ENGINE, model="tiny:qwen3",
)  # fmt: skip
def received_in_another_order(original: Any, fire: FireCounter, chunk: Any, buffer: Any) -> Any:
    """The receiver cuts its buffer by metadata of another order, which takes keys for values in one layer."""
    found = dict(original(chunk, buffer))
    if _swap(found, *(f"model.layers.2.self_attn.{part}_proj.weight" for part in "kv")):
        fire()
    return list(found.items())
