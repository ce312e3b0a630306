"""Bugs of evaluations in a training run: older weights, draws, another reward, problems that count twice or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

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


@fault(
    "marin-community/marin#7179", "verifier.trainer.generation:encode_prompt(example, tokenizer)",
    **{**ROW, "stage": Stage.DATA, "caught_by": ("DAT013",)},
)  # fmt: skip
def evaluated_without_the_first_token(call: Call) -> Any:
    """Held-out prompts are encoded without the token that begins a text, and those of the training set with it."""
    from verifier.data.arithmetic import is_held_out

    found = call.original()
    return call.wrong(found[1:]) if is_held_out(call.example.prompt) else found


@fault(
    "tensorflow/ranking#350", "verifier.trainer.generation:EngineRollouts._evaluated(self, step)",
    **{**ROW, "stage": Stage.DATA, "caught_by": ("DAT016",)},
)  # fmt: skip
def evaluated_on_other_problems(call: Call) -> Any:
    """An evaluation asks problems of the training set in the place of those that are held out."""
    count = len(call.self._held_out)
    with held(call.self, _held_out=call.self._examples[:count], _held_out_prompts=call.self._prompts[:count]):
        return call.faulty()
