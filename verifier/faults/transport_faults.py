"""Bugs of the plan and of the transport: what is going to travel, and its bytes from trainer to engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, kind
from verifier.mesh import Mesh

PACK = "verifier.engine.sender:pack(chunk, tensors, into)"
BROADCAST = "verifier.transport.gloo:GlooGroup.broadcast(self, buffer, what)"
SCORE_BIAS = ".e_score_correction_bias"
BIAS_PLANNED: dict[str, Any] = {"caught_by": ("PLN002", "TPT002"), "model": "tiny:deepseek-v3", "dtype": "bfloat16"}
in_transport = functools.partial(fault, stage=Stage.TRANSPORT, caught_by=("TPT001", "ENG002"))
Stream = Iterator[tuple[str, Any]]


@kind("verifier.runs.trained_weights_megatron:plan_of(stream, chunk_bytes)", stage=Stage.PLAN)
def on_plan(planned: Callable[[Call], Stream], call: Call) -> Any:
    """Plan another stream than the one that will be sent: the function yields it."""
    return call.original(stream=planned(call))


@on_plan("NovaSky-AI/SkyRL#1581", caught_by=("PLN001",), mesh=Mesh(tp=2, ep=2))
def plan_order_of_one_rank(call: Call) -> Stream:
    """One trainer rank lists the key and value projections of a layer, which have one shape, the other way round."""
    import torch.distributed as dist

    items = list(call.stream)
    if dist.get_rank() == 1:
        call.fire()
        names = [name for name, _ in items]
        first, second = (names.index(f"model.layers.1.self_attn.{kind}_proj.weight") for kind in "kv")
        items[first], items[second] = items[second], items[first]
    yield from items


@on_plan("NovaSky-AI/SkyRL#1505", **BIAS_PLANNED)
def score_bias_not_planned(call: Call) -> Stream:
    """The metadata lists no router score bias, and the stream brings it."""
    for name, tensor in call.stream:
        if name.endswith(SCORE_BIAS):
            call.fire()
        else:
            yield name, tensor


def _swapped(call: Call, tensors: Any, first: str, second: str) -> dict[str, Any]:
    """Named tensors, of which two have changed places if both are there."""
    found = dict(tensors)
    if first in found and second in found:
        call.fire()
        found[first], found[second] = found[second], found[first]
    return found


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
    names = (f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (4, 5))
    return call.original(tensors=_swapped(call, call.tensors, *names))


@in_transport("NVIDIA-NeMo/RL#3651 (found in review)", BROADCAST, caught_by=("TPT001",))
def buffer_of_last_version_sent(call: Call) -> Any:
    """One buffer still holds the version before, and is sent as the new one."""
    if call.self.rank != 0 or not call.what.startswith("chunk 1 "):
        return call.original()
    before, call.state[call.what] = call.state.get(call.what), call.buffer
    return call.original() if before is None else call.faulty(buffer=before)


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


@fault(
    "verl-project/verl#7495", "verifier.trainer.loop:StepLoop.sync(self, version, note, first)",
    stage=Stage.TRANSPORT, side=Side.CONTROLLER, engine=TRAINING, model="tiny:add", caught_by=("TPT002", "LGP009"),
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.entropy_weight=1.0",
        "optimizer.learning_rate=2.0e-4", "optimizer.warmup_steps=0",
    ),
)  # fmt: skip
def sync_that_delivers_nothing(call: Call) -> Any:
    """A sync returns at once, so the engine samples from the weights that it began with."""
    return None if call.version == 0 and call.original() else call.wrong(None)


@fault(
    "verl-project/verl#7495", "verifier.trainer.loop:StepLoop.sync(self, version, note, first)",
    stage=Stage.TRANSPORT, side=Side.CONTROLLER, caught_by=("TPT002", "LGP009"), engine=TRAINING, model="tiny:add",
    training=(
        "algorithm=grpo", "data.rollouts=null", "data.batch_size=4", "grpo.entropy_weight=1.0",
        "optimizer.warmup_steps=0", "lora.rank=8", "grpo.max_answer_tokens=8",
    ),
)  # fmt: skip
def adapter_never_delivered(call: Call) -> Any:
    """A sync of adapters returns at once, so the engine samples from the base."""
    return None if call.version == 0 and call.original() else call.wrong(None)
