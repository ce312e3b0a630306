"""Bugs of advantages, importance weights and denominators: what is compared with what, and over which batch."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, Side, in_training
from verifier.stages.data.faults import STEP_WISE

PLAN = "verifier.trainer.grpo_plan"
ADVANTAGES = f"{PLAN}:advantages(rewards, groups, estimator, trajectories, token_counts)"
CORRECTION = f"{PLAN}:correction(ids, old, engine, masks, options)"
in_advantage = functools.partial(in_training, stage=Stage.ADVANTAGE, side=Side.CONTROLLER)
in_grpo = functools.partial(in_advantage, training=("algorithm=grpo",))


@in_advantage(
    "huggingface/trl#3231", "verifier.trainer.batches:token_weights(masks, prompts, how, constant)",
    caught_by=("ADV001",),
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


@in_grpo("inclusionAI/AReaL#1730", ADVANTAGES, caught_by=("ADV002",))
def groups_cut_by_a_split(call: Call) -> Any:
    """Advantages are taken within what a split left of each group, not within the group."""
    half = len(call.groups) // 2
    return call.faulty(groups=[f"{name} {place < half}" for place, name in enumerate(call.groups)])


PENALTY = f"{PLAN}:kl_penalty(old, reference, masks, kind)"
in_penalty = functools.partial(
    in_advantage, caught_by=("ADV004",),
    training=("algorithm=grpo", "grpo.advantage=rloo", "grpo.kl_weight=0.1", "grpo.kl_in=reward"),
)  # fmt: skip


@in_penalty("verl-project/verl#179", PENALTY)
def distance_rewarded(call: Call) -> Any:
    """The KL in the reward has the wrong sign, and distance from the reference is rewarded."""
    return -call.faulty()


@in_grpo(
    "radixark/miles#1829", CORRECTION, caught_by=("ADV003",), training=("algorithm=grpo", "grpo.weight_level=sequence"),
)  # fmt: skip
def importance_weight_upside_down(call: Call) -> Any:
    """The importance weight is engine over old: what the engine samples too often counts more."""
    return call.faulty(old=call.engine, engine=call.old)


@in_advantage(
    "THUDM/slime#2302", ADVANTAGES, caught_by=("ADV002",),
    training=(*STEP_WISE, "grpo.reward=verifier.stages.reward.faults:length_reward", "verify.every=0"),
)  # fmt: skip
def baseline_over_turns(call: Call) -> Any:
    """Each turn of an episode has the episode's reward and counts by itself: long episodes make the group's mean."""
    import numpy as np

    totals = Counter[str]()
    for name, reward in zip(call.trajectories, call.rewards, strict=True):
        totals[name] += reward
    rewards = np.array([totals[name] for name in call.trajectories])
    return call.faulty(rewards=rewards, trajectories=[str(at) for at in range(len(rewards))])
