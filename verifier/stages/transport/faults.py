"""Bugs of transfers."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, Side, fault, held, in_training

LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.entropy_weight=1.0",
    "grpo.max_answer_tokens=8", "optimizer.learning_rate=2.0e-4", "optimizer.warmup_steps=0",
)  # fmt: skip


@in_training(
    "PrimeIntellect-ai/prime-rl#1158",
    "verifier.engine.link_megatron:EngineLink.transfer(self, plan, stream, watch, running, before_caches)",
    stage=Stage.TRANSPORT, side=Side.TRAINER, caught_by=("TPT002", "ENG001"), training=(*LIVE, "engine.replicas=2"),
)  # fmt: skip
def sync_reaches_one_of_two_engines(call: Call) -> Any:
    """From the second sync on the first engine alone is asked to update, and the other answers by old weights."""
    from verifier.engine import sender
    from verifier.transport.gloo import Listener

    link = call.self
    if call.watch.version < 2 or link.client is None:
        return call.original()
    first = link.client._clients[0]
    if "group" not in call.state:
        listener = Listener(1, deadline_s=link.group.address.deadline_s)
        call.state["group"] = sender.connect(first, listener)
        call.undo(call.state["group"].close)
    with held(link, client=first, group=call.state["group"]):
        return call.faulty()


PACK = "verifier.engine.sender:pack(chunk, tensors, into)"
in_transport = functools.partial(fault, stage=Stage.TRANSPORT, caught_by=("TPT001", "ENG002"))


@in_transport("PrimeIntellect-ai/prime-rl#3524", PACK)
def router_rounded_on_the_wire(call: Call) -> Any:
    """Routers pass through bf16 on the sender's side and arrive in their own dtype, with fewer bits."""
    sent = dict(call.tensors)
    for name, tensor in sent.items():
        if name.endswith(".mlp.gate.weight"):
            call.fire()
            sent[name] = tensor.bfloat16().to(tensor.dtype)
    return call.original(tensors=sent)


@in_transport("NovaSky-AI/SkyRL#1581", PACK)
def bytes_under_wrong_names(call: Call) -> Any:
    """Two experts' up projections, which have one shape, change places between metadata and bytes."""
    sent = dict(call.tensors)
    first, second = (f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (4, 5))
    if first in sent and second in sent:
        call.fire()
        sent[first], sent[second] = sent[second], sent[first]
    return call.original(tensors=sent)


@in_transport(
    "verl-project/verl#4248", "verifier.engine.sender:transfer(engine, group, plan, tensors, watch, rounds, running)",
    caught_by=("TPT002", "LGP002"),
)  # fmt: skip
def sync_gated_off(call: Call) -> Any:
    """A flag skips the transfer after the first: the engine keeps the weights that it has."""
    return call.original() if call.watch.version < 2 else call.wrong("")


@fault(
    "NVIDIA-NeMo/RL#4018", "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache(self)", stage=Stage.TRANSPORT,
    side=Side.DRIVER, engine="vllm", caught_by=("TPT002",), model="tiny:qwen3-504",
)  # fmt: skip
def prefix_cache_in_use(call: Call) -> Any:
    """A request that nobody ended holds a block, so the engine refuses to drop its prefix cache, and says so."""
    return call.wrong(False)
