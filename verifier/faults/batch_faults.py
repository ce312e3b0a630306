"""Bugs of a training run before its ranks see the batch: data, account of tokens, weights of tokens."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

ROW: dict[str, Any] = {"side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add"}
BATCHES = "verifier.trainer.batches"


@fault(
    "huggingface/open-r1#450", f"{BATCHES}:batch_indices(num_examples, batch_size, seed, step)",
    stage=Stage.DATA, caught_by=("DAT001",), **ROW,
)  # fmt: skip
def position_of_data_lost(call: Call) -> Any:
    """Every step begins the data set anew, as a run does that resumes without its position."""
    return call.faulty(step=0)


@fault(
    "verl-project/verl#6362", f"{BATCHES}:save_rollouts(path, rollouts, columns)",
    stage=Stage.DATA, caught_by=("DAT002",), **ROW,
)  # fmt: skip
def rollout_left_out_unsaid(call: Call) -> Any:
    """The last rollout of a batch is left out on its way to the ranks, and no account has it."""
    columns = {name: values[:-1] for name, values in call.columns.items()}
    return call.faulty(rollouts=call.rollouts[:-1], columns=columns)


@fault(
    "huggingface/trl#3231", f"{BATCHES}:token_weights(masks, prompts, how, constant)",
    stage=Stage.ADVANTAGE, caught_by=("ADV001",), **ROW,
)  # fmt: skip
def mean_of_micro_batches(call: Call) -> Any:
    """The mean over tokens is a mean of means, each over its own few sequences."""
    import numpy as np

    call.fire()
    parts = np.array_split(np.arange(len(call.masks)), 3)
    return [
        call.masks[index] / (sum(int(call.masks[other].sum()) for other in part) * len(parts))
        for part in parts
        for index in part
    ]


GRPO: dict[str, Any] = {**ROW, "training": ("algorithm=grpo",)}
PLAN = "verifier.trainer.grpo_plan"


@fault(
    "verl-project/verl#7274", f"{PLAN}:read_recorded(path, vocab_size, group_size, max_tokens)",
    stage=Stage.REWARD, caught_by=("RWD001",), **GRPO,
)  # fmt: skip
def answers_beyond_the_window(call: Call) -> Any:
    """The reward looks at the last six characters, in which no right answer fits."""
    from msgspec.structs import replace

    rows = call.original()
    call.fire()
    return tuple(replace(row, reward=row.reward if len(row.text) <= 6 else 0.0) for row in rows)


@fault(
    "inclusionAI/AReaL#1730", f"{PLAN}:advantages(rewards, groups, estimator, trajectories, token_counts)",
    stage=Stage.ADVANTAGE, caught_by=("ADV002",), **GRPO,
)  # fmt: skip
def groups_cut_by_a_split(call: Call) -> Any:
    """Advantages are taken within what a split left of each group, not within the group."""
    half = len(call.groups) // 2
    return call.faulty(groups=[f"{name} {place < half}" for place, name in enumerate(call.groups)])


@fault(
    "radixark/miles#1829", f"{PLAN}:correction(ids, old, engine, masks, options)",
    stage=Stage.ADVANTAGE, caught_by=("ADV003",),
    **{**GRPO, "training": ("algorithm=grpo", "grpo.weight_level=sequence")},
)  # fmt: skip
def importance_weight_upside_down(call: Call) -> Any:
    """The importance weight is engine over old: what the engine samples too often counts more."""
    return call.faulty(old=call.engine, engine=call.old)
