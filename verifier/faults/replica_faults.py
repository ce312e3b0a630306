"""Bugs of runs with several engines, and of engines that are started again: other weights, or the seeds of another."""

from __future__ import annotations

import os
import signal
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.entropy_weight=1.0",
    "grpo.max_answer_tokens=8", "optimizer.learning_rate=2.0e-4", "optimizer.warmup_steps=0",
)  # fmt: skip


@fault(
    "PrimeIntellect-ai/prime-rl#1158",
    "verifier.engine.link_megatron:EngineLink.transfer(self, plan, stream, watch, running, before_caches)",
    stage=Stage.TRANSPORT, side=Side.TRAINER, engine=TRAINING, model="tiny:add", caught_by=("TPT002", "ENG001"),
    training=(*LIVE, "engine.replicas=2"),
)  # fmt: skip
def sync_reaches_one_of_two_engines(call: Call) -> Any:
    """From the second sync on the first engine alone is asked to update, and the other answers by old weights."""
    from verifier.engine import sender
    from verifier.transport.gloo import Listener

    link = call.self
    if call.watch.version < 2:
        return call.original()
    first = link.client._clients[0]
    if "group" not in call.state:
        listener = Listener(1, deadline_s=link.group.address.deadline_s)
        call.state["group"] = sender.connect(first, listener)
        call.undo(call.state["group"].close)
    with held(link, client=first, group=call.state["group"]):
        return call.faulty()


@fault(
    "radixark/miles#1724", "verifier.trainer.engines:Revival.repeated(self, function, version)",
    stage=Stage.ENGINE, side=Side.CONTROLLER, engine=TRAINING, model="tiny:add",
    caught_by=("ENG001", "LGP009"), training=LIVE,
)  # fmt: skip
def restarted_engine_answers_before_its_sync(call: Call) -> Any:
    """An engine that died is asked as soon as it runs again, and answers by the checkpoint that the run began with."""
    from verifier.engine.client import EngineGone

    engines = call.self.engines
    if call.version != 1 or engines.restarted:
        return call.original()
    os.kill(engines.pids[0], signal.SIGKILL)
    try:
        return call.function()
    except EngineGone as problem:
        call.self.revive(problem)
    return call.wrong(call.function())
