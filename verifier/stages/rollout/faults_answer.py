"""Bugs of live answers in training: end tokens out of the loss, answers that count as cut off, lost stop tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, fault
from verifier.stages.data.faults_answer import GENERATION, ROW

ASKS = f"{GENERATION}._asked(self, step, number, indices)"


@fault("NovaSky-AI/SkyRL#1319", ASKS, stage=Stage.ROLLOUT, **ROW)
def stop_token_not_asked_for(call: Call) -> Any:
    """The stop token does not reach the engine, and answers run on past their end token up to the limit."""
    prompts, sampling = call.original()
    return call.wrong((prompts, dataclasses.replace(sampling, stop=())))
