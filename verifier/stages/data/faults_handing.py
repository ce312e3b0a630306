"""Bugs between an engine or a reward and the batch: values that are rounded, filled in, or handed to another answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

ROW: dict[str, Any] = {"side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add"}
ANSWERS: dict[str, Any] = {**ROW, "stage": Stage.ROLLOUT, "caught_by": ("DAT014",)}
ROUTES: dict[str, Any] = {
    **ANSWERS, "stage": Stage.DATA, "model": "tiny:add-moe",
    "training": (
        "algorithm=grpo", "data.rollouts=null", "engine.kind=vllm", "data.batch_size=4", "grpo.max_answer_tokens=8",
        "grpo.group_size=4", "grpo.entropy_weight=0.05", "grpo.replay_routes=true", "steps=2",
    ),
}  # fmt: skip


@fault(
    "NovaSky-AI/SkyRL#1908", "verifier.engine.client:EngineClient.generate(self, prompts, sampling)", **ROUTES,
)  # fmt: skip
def routes_of_another_answer_on_their_way(call: Call) -> Any:
    """Answers of a group are sorted anew on their way to the batch, and their routes stay where they were."""
    found = []
    for samples in call.faulty():
        others = [*samples[1:], samples[0]]
        routes = [
            tuple(other.routes[at % len(other.routes)] for at in range(len(own.routes)))
            for own, other in zip(samples, others, strict=True)
        ]
        found.append([dataclasses.replace(own, routes=given) for own, given in zip(samples, routes, strict=True)])
    return found


@fault(
    "NVIDIA-NeMo/labs-molt#109", "verifier.engine.client:EngineClient.generate(self, prompts, sampling)",
    stage=Stage.DATA, side=Side.CONTROLLER, engine=TRAINING, model="tiny:add", caught_by=("DAT007",),
    training=("algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4",
              "grpo.max_answer_tokens=8"),
)  # fmt: skip
def answer_of_a_group_lost(call: Call) -> Any:
    """An answer is lost on its way from the engine, and the advantages are those of the group that is left."""
    found = call.original()
    if len(found[-1]) == 1:
        return found
    return call.wrong([*found[:-1], found[-1][:-1]])
