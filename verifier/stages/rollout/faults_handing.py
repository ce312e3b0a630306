"""Bugs between an engine or a reward and the batch: values that are rounded, filled in, or handed to another answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, Side, fault
from verifier.stages.data.faults_handing import ANSWERS, ROUTES

KNOBS = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=16",
    "grpo.group_size=4", "grpo.entropy_weight=0.05", "steps=2",
)  # fmt: skip
SCORED = "verifier.trainer.grpo_plan:GrpoPlan._scored(self, step, given, parts, score)"


@fault(
    "unslothai/unsloth-zoo#891 (found in review)",
    SCORED,
    training=(*KNOBS, "verify.every=1", "grpo.weight_level=token"),
    **ANSWERS,
)
def trainer_scores_for_the_engines(call: Call) -> Any:
    """The trainer's log-probabilities stand in for the engine's, and every importance weight is 1."""
    import numpy as np

    found = call.faulty()
    for at, (item, old) in enumerate(zip(call.given, found.old, strict=True)):
        call.given[at] = dataclasses.replace(item, logprobs=np.where(item.sampled, old, np.nan).astype(np.float32))
    return found


@fault(
    "vllm-project/vllm#39568 (kin: there routes were misaligned after a preemption)",
    "verifier.engine.vllm.engine_vllm:VllmEngine._routed(self, output, asked)",
    **ROUTES | {
        "stage": Stage.ROLLOUT, "side": Side.DRIVER, "caught_by": ("LGP003", "LGP009"),
        "training": (*ROUTES["training"], "dtype=bf16", "verify.every=1"),
    },
)  # fmt: skip
def route_of_the_token_before_reported(call: Call) -> Any:
    """The experts that vLLM reports of an answer's first token are those of the token before it."""
    import numpy as np

    from verifier.core.seal import seal_of_array

    sample, at = call.original(), len(call.output.prompt_token_ids)
    if len(sample.routes) <= at:
        return sample
    routes = (*sample.routes[:at], sample.routes[at - 1], *sample.routes[at + 1 :])
    return call.wrong(dataclasses.replace(sample, routes=routes, routes_seal=seal_of_array(np.array(routes, np.int32))))
