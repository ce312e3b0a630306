"""Bugs of advantages, importance weights and denominators: what is compared with what, and over which batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault
from verifier.faults.turn_faults import STEP_WISE

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


@fault("THUDM/slime#1414", ADVANTAGES, caught_by=("ADV002",), **GRPO)
def one_group_of_the_batch(call: Call) -> Any:
    """Rewards are normalised over the whole batch, not within each prompt's group."""
    return call.faulty(groups=["all"] * len(call.groups))


@fault("PrimeIntellect-ai/prime-rl#600", ADVANTAGES, caught_by=("ADV002",), **GRPO)
def groups_by_a_window(call: Call) -> Any:
    """Groups are cut by a window over rollouts that lie prompt by prompt in turn, so each has many prompts."""
    size = len(call.groups) // len(set(call.groups))
    return call.faulty(groups=[str(place % size) for place in range(len(call.groups))])


@fault("axon-rl/gem#113", ADVANTAGES, caught_by=("ADV002",), **GRPO)
def normalised_twice(call: Call) -> Any:
    """Advantages of groups are normalised once more over the whole batch."""
    found = call.faulty()
    return (found - found.mean()) / (found.std(ddof=1) + 1e-6)


PENALTY = f"{PLAN}:kl_penalty(old, reference, masks, kind)"
PENALISED: dict[str, Any] = {
    **ROW, "caught_by": ("ADV004",),
    "training": ("algorithm=grpo", "grpo.advantage=rloo", "grpo.kl_weight=0.1", "grpo.kl_in=reward"),
}  # fmt: skip


@fault("verl-project/verl#179", PENALTY, **PENALISED)
def distance_rewarded(call: Call) -> Any:
    """The KL in the reward has the wrong sign, and distance from the reference is rewarded."""
    return -call.faulty()


@fault("CarperAI/trlx#441", PENALTY, **PENALISED)
def penalty_of_the_mean(call: Call) -> Any:
    """The KL in the reward is the mean over a rollout's tokens, where their sum was asked for."""
    import numpy as np

    return call.faulty() / np.array([int(mask.sum()) for mask in call.masks])


@fault("THUDM/slime#1372", PENALTY, **PENALISED)
def penalty_over_the_prompt(call: Call) -> Any:
    """The KL in the reward is summed over every token of a rollout, those of the prompt included."""
    import numpy as np

    return call.faulty(masks=[np.isfinite(values) for values in call.old])


@fault("THUDM/slime#1247", PENALTY, **PENALISED)
def penalty_left_out(call: Call) -> Any:
    """The KL is computed and never taken from the reward, whatever its weight."""
    return call.faulty() * 0


@fault(
    "radixark/miles#1829", CORRECTION, caught_by=("ADV003",),
    **{**GRPO, "training": ("algorithm=grpo", "grpo.weight_level=sequence")},
)  # fmt: skip
def importance_weight_upside_down(call: Call) -> Any:
    """The importance weight is engine over old: what the engine samples too often counts more."""
    return call.faulty(old=call.engine, engine=call.old)


@fault(
    "OpenRLHF/OpenRLHF#1295", CORRECTION, caught_by=("ADV003",),
    **{**GRPO, "training": ("algorithm=grpo", "grpo.weight_level=token", "grpo.weight_cap=1.0")},
)  # fmt: skip
def importance_weight_not_capped(call: Call) -> Any:
    """Importance weights are not truncated, so one token may rule the step."""
    return call.faulty(options=replace(call.options, cap=None))


@fault(
    "NVIDIA-NeMo/RL#2269", CORRECTION, caught_by=("ADV003",),
    **{**GRPO, "training": ("algorithm=grpo", "grpo.weight_level=geometric")},
)  # fmt: skip
def importance_weight_of_the_sum(call: Call) -> Any:
    """A sequence's importance weight is the product over its tokens, where their geometric mean was asked for."""
    return call.faulty(options=replace(call.options, weight="sequence"))


@fault(
    "THUDM/slime#657", f"{PLAN}:weights_of(config, rollouts)", caught_by=("ADV001",),
    **{**GRPO, "training": ("algorithm=grpo", "grpo.drop_overlong=true")},
)  # fmt: skip
def dropped_tokens_in_the_denominator(call: Call) -> Any:
    """Tokens that a filter dropped still count in the denominator, so the rest weighs less."""
    import numpy as np

    right = call.faulty()
    kept, given = (sum(int(getattr(item, name).sum()) for item in call.rollouts) for name in ("mask", "sampled"))
    return [np.asarray(weights) * kept / given for weights in right]


@fault(
    "THUDM/slime#2302", ADVANTAGES, caught_by=("ADV002",),
    **{
        **ROW,
        "training": (*STEP_WISE, "grpo.reward=verifier.faults.reward_faults:length_reward", "verify.every=0"),
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
