"""Bugs of advantages, importance weights and denominators: what is compared with what, and over which batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.stages.data.faults import STEP_WISE

PLAN = "verifier.trainer.grpo_plan"
ADVANTAGES = f"{PLAN}:advantages(rewards, groups, estimator, trajectories, token_counts)"
CORRECTION = f"{PLAN}:correction(ids, old, engine, masks, options)"
ROW: dict[str, Any] = {
    "stage": Stage.ADVANTAGE, "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
}  # fmt: skip
GRPO: dict[str, Any] = {**ROW, "training": ("algorithm=grpo",)}


@fault(
    "huggingface/trl#3231", "verifier.trainer.batches:token_weights(masks, prompts, how, constant)",
    caught_by=("ADV001",), **ROW,
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


@fault("inclusionAI/AReaL#1730", ADVANTAGES, caught_by=("ADV002",), **GRPO)
def groups_cut_by_a_split(call: Call) -> Any:
    """Advantages are taken within what a split left of each group, not within the group."""
    half = len(call.groups) // 2
    return call.faulty(groups=[f"{name} {place < half}" for place, name in enumerate(call.groups)])


PENALTY = f"{PLAN}:kl_penalty(old, reference, masks, kind)"
PENALISED: dict[str, Any] = {
    **ROW, "caught_by": ("ADV004",),
    "training": ("algorithm=grpo", "grpo.advantage=rloo", "grpo.kl_weight=0.1", "grpo.kl_in=reward"),
}  # fmt: skip


@fault("verl-project/verl#179", PENALTY, **PENALISED)
def distance_rewarded(call: Call) -> Any:
    """The KL in the reward has the wrong sign, and distance from the reference is rewarded."""
    return -call.faulty()


@fault(
    "radixark/miles#1829", CORRECTION, caught_by=("ADV003",),
    **{**GRPO, "training": ("algorithm=grpo", "grpo.weight_level=sequence")},
)  # fmt: skip
def importance_weight_upside_down(call: Call) -> Any:
    """The importance weight is engine over old: what the engine samples too often counts more."""
    return call.faulty(old=call.engine, engine=call.old)


@fault(
    "THUDM/slime#2302", ADVANTAGES, caught_by=("ADV002",),
    **{
        **ROW,
        "training": (*STEP_WISE, "grpo.reward=verifier.stages.reward.faults:length_reward", "verify.every=0"),
    },
)  # fmt: skip
def baseline_over_turns(call: Call) -> Any:
    """Each turn of an episode has the episode's reward and counts by itself: long episodes make the group's mean."""
    import numpy as np

    totals = Counter[str]()
    for name, reward in zip(call.trajectories, call.rewards, strict=True):
        totals[name] += reward
    rewards = np.array([totals[name] for name in call.trajectories])
    return call.faulty(rewards=rewards, trajectories=[str(at) for at in range(len(rewards))])
