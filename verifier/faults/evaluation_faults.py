"""Bugs of evaluations in a training run: older weights, draws, another reward, problems that count twice or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.draw_faults import GENERATE, TOP_K, under
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
    "verifier.trainer.episodes:Episodes.play(self, sampler, prompts, sampling, stride, examples)", **ROW,
)  # fmt: skip
def one_seed_for_an_evaluation(call: Call) -> Any:
    """The seed of an evaluation is handed to each of its requests as it is, and all of them draw alike."""
    if call.sampling.n > 1:
        return call.original()
    return call.faulty(sampling=replace(call.sampling, each=[call.sampling] * len(call.prompts)))


TUNED: dict[str, Any] = {
    "stage": Stage.LOSS, "engine": TRAINING, "model": "tiny:add", "caught_by": ("MET003",),
    "training": ("evaluation.num_problems=15", "evaluation.every=1", "optimizer.learning_rate=0.01"),
}  # fmt: skip
GREEDY = "verifier.trainer.update_facts_megatron:greedy_answers(trainer, rollouts, batching)"
EVALUATED = "verifier.trainer.generation:EngineRollouts._evaluated(self, step)"
SCORE = "verifier.rewards.scorer:RewardPool.score(self, episodes)"


@fault("areal-project/AReaL#1100", GREEDY, **TUNED)
def last_problems_counted_twice(call: Call) -> Any:
    """The held-out problems are padded to a multiple of the batch with copies, and these count in the accuracy."""
    found = call.original()
    return call.wrong([*found, *found[: -len(found) % 8]])


@fault(
    "rllm-org/rllm#382", GREEDY,
    **{**TUNED, "caught_by": ("MET004",), "training": ("evaluation.num_problems=15", "evaluation.every=0")},
)  # fmt: skip
def failed_problems_left_out_of_the_last_accuracy(call: Call) -> Any:
    """The accuracy that a run ends with is over the problems that did not fail before they were answered."""
    return call.wrong(call.original()[:-3])


@fault("huggingface/trl#5617", GREEDY, **TUNED)
def end_token_alone_decides_the_accuracy(call: Call) -> Any:
    """The accuracy is over other tokens than the loss: a problem is solved where its end token is the likeliest."""
    import dataclasses

    import numpy as np

    def ends(mask: Any) -> Any:
        return mask & ~np.append(mask[1:], np.bool_(False))

    return call.faulty(rollouts=[dataclasses.replace(item, mask=ends(item.mask)) for item in call.rollouts])


@fault("PeterGriffinJin/Search-R1#56", SCORE, **{**ROW, "stage": Stage.REWARD, "caught_by": ("MET003",)})
def last_problems_of_an_evaluation_dropped(call: Call) -> Any:
    """The held-out problems beyond a multiple of the batch are dropped, and the rest is all that accuracy is of."""
    found = call.original()
    return call.wrong(found[: len(found) // 8 * 8]) if call.state.get("evaluates") else found


@fault("TIGER-AI-Lab/verl-tool#14", SCORE, **{**ROW, "stage": Stage.REWARD, "caught_by": ("RWD001",)})
def evaluation_rewards_any_number(call: Call) -> Any:
    """An evaluation scores by another reward than training: an answer that has a number is right."""
    found = call.original()
    if not call.state.get("evaluates"):
        return found
    return call.wrong([float(any(letter.isdigit() for letter in item.completion)) for item in call.episodes])


@fault(
    "strands-agents/evals#198", SCORE, **{**ROW, "stage": Stage.REWARD, "caught_by": ("RWD003",)} | {
        "training": (*ROW["training"], "grpo.reward=verifier.faults.reward_faults:length_reward"),
    },
)  # fmt: skip
def evaluation_rewards_as_they_finish(call: Call) -> Any:
    """The answers of an evaluation are scored side by side, and their rewards stand in the order in which they came."""
    if not call.state.get("evaluates"):
        return call.original()
    return call.faulty(episodes=sorted(call.episodes, key=lambda item: len(item.completion)))


@fault("verl-project/verl#78", EVALUATED, **{**ROW, "stage": Stage.REWARD, "caught_by": ("MET003",)})
def last_batch_of_an_evaluation_never_asked(call: Call) -> Any:
    """The loader of held-out problems drops its last batch: no answer of it is sampled, and all counts agree."""
    own, whole = call.self, len(call.self._held_out) // 8 * 8
    with held(own, _held_out=own._held_out[:whole], _held_out_prompts=own._held_out_prompts[:whole]):
        return call.faulty()


@evaluation_rewards_as_they_finish.also(EVALUATED)
@last_problems_of_an_evaluation_dropped.also(EVALUATED)
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


@fault(
    "areal-project/AReaL#1636", "verifier.trainer.loop:StepLoop._evaluate(self, step)", side=Side.CONTROLLER,
    **{**TUNED, "training": ("evaluation.num_problems=15", "evaluation.every=2", "optimizer.learning_rate=0.01")},
)  # fmt: skip
def baseline_after_the_first_update(call: Call) -> Any:
    """The evaluation before the first step waits for the evaluator's first turn, which comes after an update."""
    if call.step:
        return call.original()
    call.state["shown"] = shown = dict[str, float]()
    call.state["later"] = call.original
    return shown


@baseline_after_the_first_update.also("verifier.trainer.loop:StepLoop._take(self, update, trace, oracle, last)")
def _evaluate_then(call: Call) -> Any:
    report = call.original()
    if (later := call.state.pop("later", None)) is not None:
        call.fire()
        call.state["shown"].update(later())
    return report


@fault(
    "rllm-org/rllm#382 (kin: there it was the accuracy that a run ends with)", EVALUATED,
    **{**ROW, "stage": Stage.REWARD, "caught_by": ("MET003",)} | {
        "training": (
            *(text.replace("every=1", "every=2") for text in ROW["training"]),
            "grpo.reward=verifier.faults.reward_faults:length_reward",
        ),
    },
)  # fmt: skip
def failed_problems_left_out_of_the_baseline(call: Call) -> Any:
    """The numbers of the evaluation before the first step are over the problems that did not fail before an answer."""
    found = call.original()
    if call.step:
        return found
    given = {item.name.removeprefix("held-out "): item.rewards[:-3] for item in call.self._answered.rewards}
    return call.wrong({**found, **{name: sum(rewards) / len(rewards) for name, rewards in given.items()}})
