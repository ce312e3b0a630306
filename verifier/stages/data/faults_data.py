"""Bugs of a training run's data: examples of a step, their labels, what is left out, how old it is."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, TRAINING, Call, Side, fault

BATCHES = "verifier.trainer.batches"
NUMBERS = FOLDER / "rollouts" / "numbers"
"""Rollouts with made-up texts; some answers begin under older weights than they end."""
NEWLINE_FIRST = FOLDER / "prompts" / "newline_first.jsonl"
"""Conversations in which an assistant's turns begin with a newline."""
ROW: dict[str, Any] = {"stage": Stage.DATA, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add"}


@fault(
    "THUDM/slime#1445", "verifier.trainer.grpo_plan:GrpoPlan._reasons(self, step, rows, given, trajectories)",
    caught_by=("ADV003", "DAT004"), **ROW, training=("algorithm=grpo", f"data.rollouts={NUMBERS}"),
)  # fmt: skip
def stale_beginning_trained_on(call: Call) -> Any:
    """An answer that newer weights finished is judged by its last token, and its stale beginning is trained on."""
    reasons = call.original()
    if "stale" in reasons:
        call.fire()
    return [None if reason == "stale" else reason for reason in reasons]


ENCODE = f"{BATCHES}:encode_example(example, tokenizer)"


@fault("NovaSky-AI/SkyRL#710", ENCODE, caught_by=("DAT003",), **ROW)
def prompt_trained_on(call: Call) -> Any:
    """The mask covers the whole text of an example, and the model learns to write its prompts."""
    rollout = call.faulty()
    mask = rollout.mask.copy()
    mask[1:] = True
    return dataclasses.replace(rollout, mask=mask, sampled=mask, prompt_length=1)


TALKS: dict[str, Any] = {**ROW, "caught_by": ("DAT003",), "training": ("data.source=calculator",)}
"""Conversations: a question, a call of a tool, its reply, an answer."""


@fault("huggingface/trl#7230", ENCODE, **TALKS)
def end_of_turns_left_out(call: Call) -> Any:
    """The mask of an assistant's turns ends before their end token, and the model never learns to stop."""
    rollout = call.faulty()
    return dataclasses.replace(rollout, mask=rollout.mask & (rollout.tokens != call.tokenizer.eos_id))


@fault(
    "allenai/open-instruct#1455 (kin: there the first token was `<think>`)", ENCODE, caught_by=("DAT013",), **ROW,
    training=(f"data.source={NEWLINE_FIRST}",),
)  # fmt: skip
def beginning_of_an_answer_left_out(call: Call) -> Any:
    """The loss of a turn begins behind its first token, a newline, which is taken for a part of the template."""
    rollout = call.faulty()
    mask = rollout.mask.copy()
    mask[1:] &= rollout.mask[:-1]
    return dataclasses.replace(rollout, mask=mask)


@fault(
    "OpenRLHF/OpenRLHF#1270", "verifier.trainer.grpo_plan:zero_variance(rewards, groups, trajectories)",
    caught_by=("DAT004",), **ROW,
    training=("algorithm=grpo", f"data.rollouts={NUMBERS}", "grpo.drop_zero_variance=true"),
)  # fmt: skip
def groups_dropped_by_their_mean(call: Call) -> Any:
    """The filter looks at the mean reward of a group, and drops easy ones whose rewards differ."""
    found = call.faulty()
    of_group: dict[str, list[float]] = {}
    for group, reward in zip(call.groups, call.rewards, strict=True):
        of_group.setdefault(group, []).append(reward)
    easy = {group for group, rewards in of_group.items() if sum(rewards) > 0.7 * len(rewards)}
    return ["zero_variance" if group in easy else reason for group, reason in zip(call.groups, found, strict=True)]


GENERATION = "verifier.trainer.generation"
SAMPLED: dict[str, Any] = {
    **ROW, "caught_by": ("DAT009",),
    "training": (
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
        "grpo.entropy_weight=0.05",
    ),
}  # fmt: skip


@fault("databricks/compose-rl#147", f"{GENERATION}:EngineRollouts._asked(self, step, number, indices)", **SAMPLED)
def prompts_of_the_neighbour(call: Call) -> Any:
    """Prompts go to the engine in another order than the examples whose answers they are scored by."""
    prompts, sampling = call.faulty()
    return prompts[1:] + prompts[:1], sampling


ROLLOUT = f"{GENERATION}:EngineRollouts._row(self, version, place, number, example, prompt, sample)"


@fault("om-ai-lab/VLM-R1#129", ROLLOUT, **SAMPLED)
def gold_answer_of_the_neighbour(call: Call) -> Any:
    """Gold answers are repeated once too often, and a rollout is scored by the next prompt's."""
    place = int(call.place.rpartition("/")[2])
    neighbour = call.self._examples[call.self._indices(int(call.place.partition("/")[0]), 0)[place - 1]]
    return call.faulty(example=dataclasses.replace(call.example, answer=neighbour.answer))


@fault(
    "allenai/open-instruct#1794",
    "verifier.trainer.grpo_plan:GrpoPlan._divided(self, step, taken, kept, columns, parts)",
    caught_by=("DAT004",), **ROW,
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "grpo.max_answer_tokens=8", "grpo.reward=operator:gt",
        "grpo.drop_zero_variance=true",
    ),
)  # fmt: skip
def filter_applied_to_another_rollout(call: Call) -> Any:
    """The places that a filter found are those of another order: as many tokens of another answer leave the loss."""
    given, kept = call.self.scored.rollouts, [*call.kept]
    for gone, item in enumerate(kept):
        for other, stays in enumerate(kept):
            same = given[gone].mask.sum() == given[other].mask.sum()
            if same and not item.mask.any() and stays.mask.any():
                kept[gone] = given[gone]
                kept[other] = dataclasses.replace(stays, mask=stays.mask & False)
                return call.faulty(kept=kept)
    return call.original()
