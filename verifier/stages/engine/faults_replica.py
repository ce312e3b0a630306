"""Bugs of runs with several engines, and of engines that are started again: other weights, or the seeds of another."""

from __future__ import annotations

import os
import signal
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.stages.transport.faults import LIVE


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
