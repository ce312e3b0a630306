"""Bugs of evaluations in a training run: of weights that are gone, or of draws that should be greedy."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

ROW: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LGP015",),
    "training": (
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
        "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0", "grpo.temperature=0.8", "evaluation.num_problems=12",
        "evaluation.every=1",
    ),
}  # fmt: skip


@fault("linhaowei1/NLPDL-2025Fall#31", "verifier.trainer.loop:StepLoop._evaluate(self, step)", **ROW)
def evaluated_before_the_sync(call: Call) -> Any:
    """An evaluation is answered before the engine gets the weights of its step, so it shows the step before."""
    return call.wrong(call.state["found"])


@evaluated_before_the_sync.also("verifier.trainer.loop:StepLoop.sync(self, version, trace)")
def _evaluate_first(call: Call) -> Any:
    if call.version:
        call.state["found"] = call.self.rollouts.evaluate(call.version)
    return call.original()


@fault(
    "LLM-Tuning-Safety/LLMs-Finetuning-Safety#7",
    "verifier.trainer.generation:Sampling(seed, max_tokens, n, stop, temperature, shape, seeded, each, ignore_end)",
    **ROW,
)  # fmt: skip
def accuracy_of_drawn_answers(call: Call) -> Any:
    """The answers of which accuracy is told are drawn at a temperature of 1, where they should be greedy."""
    return call.faulty(temperature=1.0) if call.temperature == 0 else call.original()
