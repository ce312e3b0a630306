"""Bugs of terms: a part of a training step works by other knobs than the run's config has, and tells of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

PLAN = "verifier.trainer.grpo_plan:GrpoPlan.updates(self, step, taken, score, probe)"
ROLLOUTS = "verifier.trainer.generation:EngineRollouts.__init__(self, config, checkpoint, whole_answers)"
ROW: dict[str, Any] = {"side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("CFG003",)}
PLANNED = ROW | {"stage": Stage.ADVANTAGE}
LIVE = (
    "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
    "grpo.entropy_weight=0.05",
)  # fmt: skip


def _planned_by(call: Call, **others: Any) -> Any:
    """Updates of a step by a plan that has other knobs of `grpo`."""
    config = call.self._config
    with held(call.self, _config=replace(config, grpo=replace(config.grpo, **others))):
        return call.faulty()


@fault("verl-project/verl#7893", PLAN, training=("algorithm=grpo", "grpo.advantage=dr_grpo"), **PLANNED)
def estimator_keeps_its_default(call: Call) -> Any:
    """The flag that switches the division by the deviation off is not handed on: the estimator keeps its default."""
    return _planned_by(call, advantage="grpo")


@fault("verl-project/verl#945", PLAN, training=("algorithm=grpo", "aggregation=sequence_mean"), **PLANNED)
def aggregation_not_handed_on(call: Call) -> Any:
    """The mean that the config names is not handed on, and the loss is a mean over tokens."""
    with held(call.self, _config=replace(call.self._config, aggregation="token_mean")):
        return call.faulty()


@fault(
    "inclusionAI/AReaL#930 (found in review)", PLAN,
    training=("algorithm=grpo", "grpo.weight_level=token", "grpo.weight_cap=1.0"), **PLANNED,
)  # fmt: skip
def correction_switched_on_and_not_made(call: Call) -> Any:
    """Importance weights are switched on, and another part of the config decides, by which there are none."""
    return _planned_by(call, weight_level=None, weight_cap=2.0)


@fault(
    "PrimeIntellect-ai/prime-rl#3515", PLAN, training=("algorithm=grpo",), **(ROW | {"stage": Stage.DATA}),
)  # fmt: skip
def filter_on_where_it_is_off(call: Call) -> Any:
    """Groups whose rewards are all equal leave the loss, whatever the flag of that filter says."""
    return _planned_by(call, drop_zero_variance=True)


@fault("NovaSky-AI/SkyRL#77", ROLLOUTS, training=(*LIVE, "seed=5"), **(ROW | {"stage": Stage.DATA}))
def seed_not_given_to_the_sampler(call: Call) -> Any:
    """The data's order and the answers are drawn by a seed of their own, whatever the run's seed is."""
    return call.faulty(config=replace(call.config, seed=1))


@fault(
    "huggingface/alignment-handbook#80", ROLLOUTS, training=(*LIVE, "data.num_examples=20"),
    **(ROW | {"stage": Stage.DATA}),
)  # fmt: skip
def number_of_examples_not_read(call: Call) -> Any:
    """The number of examples to train on is in the config and read nowhere: the run trains on all of them."""
    return call.faulty(config=replace(call.config, data=replace(call.config.data, num_examples=None)))


@fault(
    "NovaSky-AI/SkyRL#1317 (kin: there the limit of an evaluation)", ROLLOUTS, training=LIVE,
    **(ROW | {"stage": Stage.ROLLOUT}),
)  # fmt: skip
def limit_of_answers_of_another_group(call: Call) -> Any:
    """Answers are limited by another group of knobs, which has a default of its own, and are cut off early."""
    return call.faulty(config=replace(call.config, grpo=replace(call.config.grpo, max_answer_tokens=5)))
