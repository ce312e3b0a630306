"""Bugs of evaluations in a training run: older weights, draws, another reward, problems that count twice or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.draw_faults import GENERATE, TOP_K, under
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


@fault(
    "THUDM/slime#2242", GENERATE,
    **{**ROW, "training": tuple(text for text in ROW["training"] if not text.startswith("grpo.temperature"))},
)  # fmt: skip
def evaluation_under_the_servers_top_k(call: Call) -> Any:
    """An evaluation's own sampling parameters are lost, and the server's top-k cuts what its answers are drawn from."""
    if call.sampling.n > 1 or not call.sampling.temperature:
        return call.original()
    return under(call, top_k=TOP_K)


@fault(
    "areal-project/AReaL#1524 (found in review)",
    "verifier.trainer.episodes:Episodes.play(self, sampler, prompts, sampling, stride)", **ROW,
)  # fmt: skip
def one_seed_for_an_evaluation(call: Call) -> Any:
    """The seed of an evaluation is handed to each of its requests as it is, and all of them draw alike."""
    if call.sampling.n > 1:
        return call.original()
    return call.faulty(sampling=replace(call.sampling, each=[call.sampling] * len(call.prompts)))


TUNED: dict[str, Any] = {
    "stage": Stage.LOSS, "engine": TRAINING, "model": "tiny:add",
    "training": ("evaluation.num_problems=15", "evaluation.every=1", "optimizer.learning_rate=0.01"),
}  # fmt: skip
EVALUATED = "verifier.trainer.generation:EngineRollouts._evaluated(self, step)"
SCORE = "verifier.rewards.scorer:RewardProcess.score(self, ids, completions, answers)"


@fault("TIGER-AI-Lab/verl-tool#14", SCORE, **{**ROW, "stage": Stage.REWARD, "caught_by": ("RWD001",)})
def evaluation_rewards_any_number(call: Call) -> Any:
    """An evaluation scores by another reward than training: an answer that has a number is right."""
    found = call.original()
    if not call.state.get("evaluates"):
        return found
    return call.wrong([float(any(letter.isdigit() for letter in text)) for text in call.completions])


@fault(
    "strands-agents/evals#198", SCORE, **{**ROW, "stage": Stage.REWARD, "caught_by": ("RWD003",)} | {
        "training": (*ROW["training"], "grpo.reward=verifier.faults.reward_faults:length_reward"),
    },
)  # fmt: skip
def evaluation_rewards_as_they_finish(call: Call) -> Any:
    """The answers of an evaluation are scored side by side, and their rewards stand in the order in which they came."""
    if not call.state.get("evaluates"):
        return call.original()
    order = sorted(range(len(call.completions)), key=lambda at: len(call.completions[at]))
    return call.faulty(
        ids=[call.ids[at] for at in order], completions=[call.completions[at] for at in order],
        answers=[call.answers[at] for at in order],
    )  # fmt: skip


@evaluation_rewards_as_they_finish.also(EVALUATED)
@evaluation_rewards_any_number.also(EVALUATED)
def _evaluates(call: Call) -> Any:
    call.state["evaluates"] = True
    try:
        return call.original()
    finally:
        call.state["evaluates"] = False


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
    "axolotl-ai-cloud/axolotl#3824", "verifier.trainer.batches:HeldOut.save(self, file)",
    side=Side.CONTROLLER, **{**TUNED, "stage": Stage.DATA, "caught_by": ("DAT013",)},
)  # fmt: skip
def tuning_evaluated_without_the_first_token(call: Call) -> None:
    """In fine-tuning, held-out problems are encoded without the token that begins a text."""
    import dataclasses

    from verifier.data.rollout_file import load_rollouts, save_rollouts

    call.faulty()
    cut = {"tokens", "mask", "sampled", "roles", "logprobs", "versions"}
    short = [
        dataclasses.replace(
            item, prompt_length=item.prompt_length - 1, **{name: getattr(item, name)[1:] for name in cut}
        )
        for item in load_rollouts(call.file)[0]
    ]  # fmt: skip
    save_rollouts(call.file, short)
