"""Bugs of evaluations in a training run: older weights, draws, another reward, problems that count twice or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.faults.fault import Call, fault
from verifier.stages.data.faults_evaluation import ROW


@fault("linhaowei1/NLPDL-2025Fall#31", "verifier.trainer.loop:StepLoop._evaluate(self, step)", **ROW)
def evaluated_before_the_sync(call: Call) -> Any:
    """An evaluation is answered before the engine gets the weights of its step, so it shows the step before."""
    return call.wrong(call.state["found"])


@evaluated_before_the_sync.also("verifier.trainer.loop:StepLoop.sync(self, version, note, first)")
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


@fault(
    "areal-project/AReaL#1524 (found in review)",
    "verifier.trainer.episodes:Episodes.play(self, sampler, prompts, sampling, stride, examples)", **ROW,
)  # fmt: skip
def one_seed_for_an_evaluation(call: Call) -> Any:
    """The seed of an evaluation is handed to each of its requests as it is, and all of them draw alike."""
    if call.sampling.n > 1:
        return call.original()
    return call.faulty(sampling=replace(call.sampling, each=[call.sampling] * len(call.prompts)))
