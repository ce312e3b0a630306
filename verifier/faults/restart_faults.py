"""Bugs of several engines and of restarted ones: weights that do not reach an engine that samples."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.faults.mode_faults import LIVE

SAMPLED: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add"}
KNOBS = (*LIVE, "data.batch_size=4", "engine.kind=hf")


@fault(
    "radixark/miles#1724", "verifier.trainer.engines:Revival.repeated(self, function, version)",
    stage=Stage.ROLLOUT, side=Side.CONTROLLER, caught_by=("LGP009",), training=KNOBS, **SAMPLED,
)  # fmt: skip
def restarted_engine_samples_before_its_sync(call: Call) -> Any:
    """An engine that died is started again and asked before the weights have come, so it samples by the checkpoint."""
    from verifier.engine.client import EngineGone

    if not call.version or call.state:
        return call.original()
    call.state["restarted"] = True
    for pid in call.self.engines.pids:
        os.kill(pid, signal.SIGKILL)
    call.self.revive(EngineGone("the engine was killed"))
    return call.wrong(call.function())


@fault(
    "sgl-project/sglang#2050",
    "verifier.trainer.weight_sync_megatron:WeightSync.connect(self, sockets, options, transport, deadline_s)",
    stage=Stage.PLAN, caught_by=("LGP009",), training=(*KNOBS, "engine.replicas=2"), **SAMPLED,
)  # fmt: skip
def sync_to_the_first_engine_alone(call: Call) -> Any:
    """Weights go to the first of two engines that sample, and the second one keeps those that it was started with."""
    return call.faulty(sockets=call.sockets[:1], options=replace(call.options, replicas=1))
