"""A step of GRPO made of its config: every knob reaches the part that works by it, and no answer or update is lost.

What this does not exercise: ranks, and real engines (tests/dist/train_clean_case.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.trainer.test_evaluated_numbers import Engine, Reward
from verifier.algorithms.advantages import advantages
from verifier.algorithms.aggregation import token_weights
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.record import Record
from verifier.data.rollout import load_rollouts
from verifier.engine.api import Sample
from verifier.knob import flat
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.probes.training.run_evidence import RunEvidence
from verifier.probes.training.sampled_step import objective_of
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.data.records import Drops, EpisodeTurns, SamplingAsked
from verifier.trainer.batches import OptimizerUpdate, SftPlan
from verifier.trainer.episodes import Turn
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.grpo_plan import GrpoPlan
from verifier.trainer.ranks import loss_of

SIZES = ("data.batch_size=4", "grpo.group_size=4", "grpo.mini_batches=2", "grpo.epochs=2", "data.num_examples=20",
         "evaluation.num_problems=0")  # fmt: skip
WEIGHED = (
    "seed=5", "aggregation=sequence_mean", "grpo.advantage=dr_grpo", "grpo.weight_level=token", "grpo.weight_cap=1.5",
    "grpo.mask_level=sequence", "grpo.mask_low=0.25", "grpo.mask_high=3.0", "grpo.temperature=0.75",
    "grpo.max_answer_tokens=7", "grpo.clip_low=0.1", "grpo.clip_high=0.3", "grpo.dual_clip=4.0",
    "grpo.entropy_weight=0.05", "grpo.kl_weight=0.02", "grpo.kl_in=loss", "grpo.kl_kind=k1",
)  # fmt: skip
REWARDED = (
    "aggregation=constant", "aggregation_constant=9", "grpo.advantage=rloo", "grpo.drop_overlong=true",
    "grpo.max_sampling_rounds=3", "grpo.kl_weight=0.5", "grpo.kl_in=reward", "grpo.loss=cispo",
)  # fmt: skip
TURNED = (
    "data.source=calculator",
    "grpo.environment=verifier.faults.echo:Echo",
    "grpo.max_turns=3",
    "grpo.step_wise=true",
    "grpo.ratio_over=engine",
)
BEHIND = 0.2
"""Nats by which the trainer's log-probability of each token is less than the engine's."""
CASES = (WEIGHED, REWARDED, TURNED)
TERMS: Mapping[type[Record], Mapping[str, str]] = {
    LossColumns: {"aggregation": "aggregation"},
    Drops: {name: f"grpo.{name}" for name in ("drop_overlong", "drop_zero_variance")},
    EpisodeTurns: {name: f"grpo.{name}" for name in ("environment", "max_turns", "step_wise")},
    Advantages: {"kl_kind": "grpo.kl_kind", "estimator": "grpo.advantage"},
    PolicyColumns: {
        name: f"grpo.{name}"
        for name in ("ratio_over", "weight_cap", "max_staleness", "keep_kv_cache")
    },
    SamplingAsked: {
        "seed": "seed", "batch_size": "data.batch_size", "max_rounds": "grpo.max_sampling_rounds",
        **{name: f"grpo.{name}" for name in ("group_size", "max_turns", "temperature", "max_answer_tokens")},
    },
}  # fmt: skip
"""Kind of record -> field -> key of the config that it is a copy of."""


class Wordy(Engine):
    """Answers by two to four tokens."""

    def generate(self, prompts: Any, sampling: Any) -> list[list[Sample]]:
        found = super().generate(prompts, sampling)
        tokens = [(prompt[-1],) * (1 + at % 3) + (self.end,) for at, prompt in enumerate(prompts)]
        return [
            [replace(item, tokens=answer, logprobs=(-1.0,) * len(answer)) for item in own]
            for own, answer in zip(found, tokens, strict=True)
        ]


class Records:
    """Keeps what is emitted."""

    def __init__(self) -> None:
        self.records = list[Record]()

    def emit(self, record: Record, arrays: Any = None) -> None:
        self.records.append(record)


def config_of(folder: Path, words: tuple[str, ...]) -> TrainConfig:
    return load(TrainConfig, overrides=["model=tiny:add", f"run={folder}", "algorithm=grpo", *SIZES, *words])[0]


def step_of(folder: Path, words: tuple[str, ...]) -> tuple[TrainConfig, list[Record], list[OptimizerUpdate], Engine]:
    """Records and updates of a run's second step, whose engine is made up."""
    config = config_of(folder, words)
    checkpoint, probe, evidence = open_checkpoint(write_tiny("add", folder)), Records(), RunEvidence(Any)
    rollouts = EngineRollouts(config, checkpoint, observer=evidence)
    rollouts._client = engine = Wordy(rollouts._tokenizer.eos_id)
    rollouts._reward = Reward()  # type: ignore[assignment]
    evidence.run, evidence._probe, evidence._spots, evidence._layers = (
        SimpleNamespace(
            config=config, model=SimpleNamespace(checkpoint=checkpoint), data=rollouts.data, whole_answers=False
        ),
        probe,
        False,
        (),
    )  # type: ignore[assignment]

    def score(file: Path, which: str) -> list[np.ndarray]:
        nats = -1.0 - BEHIND if which == "current" else -1.5
        return [np.full(len(item), nats, np.float32) for item in load_rollouts(file)[0]]

    plan = GrpoPlan(config, rollouts, lambda step, number: folder / f"{step}-{number}.safetensors", evidence)
    return config, probe.records, plan.updates(2, 10, score), engine


@pytest.mark.parametrize("words", CASES)
def test_every_part_of_a_step_works_by_the_config(tmp_path, words):
    _, records, updates, engine = step_of(tmp_path, words)
    knobs = flat(config_of(tmp_path, words).to_dict())
    for kind, fields in TERMS.items():
        for item in records:
            for name, key in fields.items() if isinstance(item, kind) else ():
                assert getattr(item, name) == knobs[key], f"{kind.__name__}.{name}"
    seen = {type(item) for item in records}
    assert {LossColumns, Drops, Advantages, PolicyColumns, SamplingAsked} <= seen
    policy, given = (next(item for item in records if isinstance(item, kind)) for kind in (PolicyColumns, Advantages))
    assert policy.weight_level == (knobs["grpo.weight_level"] or "")
    bounds = tuple(knobs[f"grpo.mask_{name}"] for name in ("level", "low", "high"))
    assert policy.masks == ((bounds,) if bounds[0] else ())
    assert given.kl_weight == (knobs["grpo.kl_weight"] if knobs["grpo.kl_in"] == "reward" else 0)
    asked = engine.sampled[0]
    assert (asked.n, asked.temperature, asked.max_tokens) == (
        knobs["grpo.group_size"], knobs["grpo.temperature"], knobs["grpo.max_answer_tokens"]
    )  # fmt: skip
    assert len(engine.prompts[0]) == knobs["data.batch_size"]
    assert asked.seed // 1_000_003 == knobs["seed"]
    weighed(given, updates, knobs)


def weighed(given: Advantages, updates: list[OptimizerUpdate], knobs: Mapping[str, Any]) -> None:
    """Advantages, their correction and the weights of tokens are those that the config asks for."""
    found = advantages(
        np.array(given.rewards) - given.penalties, given.groups, knobs["grpo.advantage"],
        trajectories=given.trajectories, token_counts=given.token_counts,
    )  # fmt: skip
    factor, by_id = np.exp(-BEHIND) if knobs["grpo.weight_level"] else 1.0, dict(zip(given.ids, found, strict=True))
    for update in updates:
        for item, values in zip(update.rollouts, update.columns["advantage"], strict=True):
            assert values[item.mask] == pytest.approx(by_id[item.id] * factor)
        masks, groups = [item.mask for item in update.rollouts], [item.group for item in update.rollouts]
        right = token_weights(masks, groups, knobs["aggregation"], knobs["aggregation_constant"])
        assert np.concatenate([*update.weights]) == pytest.approx(np.concatenate(right))


@pytest.mark.parametrize("words", CASES)
def test_the_loss_has_the_terms_of_the_config_and_its_record_the_same(words, tmp_path):
    config = config_of(tmp_path, words)
    (name, options), terms, knobs = loss_of(config), objective_of(config), config.grpo
    weight = knobs.kl_weight if knobs.kl_in == "loss" else 0.0
    right = {
        "clip_low": knobs.clip_low, "clip_high": knobs.clip_high, "dual_clip": knobs.dual_clip, "kl_weight": weight,
        "kl_kind": knobs.kl_kind, "entropy_weight": knobs.entropy_weight,
    }  # fmt: skip
    assert (name, {key: getattr(options, key) for key in right}) == (knobs.loss, right)
    assert terms == {"loss": knobs.loss, "temperature": knobs.temperature, **right}


def test_all_answers_are_in_the_files_of_a_step_each_once_and_all_its_updates_are_made(tmp_path):
    """Groups whose rewards are all equal stay: the filter is off. One pass comes before the next."""
    _, records, updates, _ = step_of(tmp_path, WEIGHED)
    ids = next(item.ids for item in records if isinstance(item, Advantages))
    assert [(item.number, item.first, item.file.stem) for item in updates] == [
        (11, True, "2-0"), (12, False, "2-1"), (13, False, "2-0"), (14, False, "2-1")
    ]  # fmt: skip
    assert len({*ids}) == 16
    for pair in (updates[:2], updates[2:]):
        assert [item.id for update in pair for item in load_rollouts(update.file)[0]] == [*ids]
        assert all(item.mask.any() for update in pair for item in load_rollouts(update.file)[0])


def test_an_estimator_without_a_deviation_is_one(tmp_path):
    """Three answers of eight are right, in groups of four: three of four, and none."""
    _, records, _, _ = step_of(tmp_path, WEIGHED)
    found = next(item for item in records if isinstance(item, Advantages))
    assert found.advantages[:4] == (0.25, 0.25, 0.25, -0.75)


def test_a_step_of_fine_tuning_has_as_many_examples_as_its_config_asks_for(tmp_path):
    words = ["model=tiny:add", f"run={tmp_path}", "data.batch_size=8", "evaluation.num_problems=0"]
    config, _ = load(TrainConfig, overrides=words)
    plan = SftPlan(config, open_checkpoint(write_tiny("add", tmp_path)), lambda step: tmp_path / f"{step}.safetensors")
    (update,) = plan.updates(1, 0, lambda file, which: [])
    assert len(load_rollouts(update.file)[0]) == 8


def test_the_reward_and_the_environment_are_those_of_the_config(tmp_path):
    config = config_of(tmp_path, ("grpo.reward=verifier.stages.reward.faults:length_reward", *TURNED))
    rollouts = EngineRollouts(config, open_checkpoint(write_tiny("add", tmp_path)))
    rollouts.start(Engine(rollouts._tokenizer.eos_id))
    try:
        assert rollouts._reward.function == config.grpo.reward  # type: ignore[union-attr]
        assert rollouts._reward.made_by == "verifier.faults.echo:Echo"  # type: ignore[union-attr]
    finally:
        rollouts.close()


def test_steps_take_each_example_once_an_epoch_in_another_order_and_none_that_is_held_out(tmp_path):
    words = ["data.batch_size=4", "data.num_examples=8", "evaluation.num_problems=0"]
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}", *words])
    plan = SftPlan(config, open_checkpoint(write_tiny("add", tmp_path)), lambda step: tmp_path / f"{step}.safetensors")
    taken = []
    for step in range(1, 7):
        (update,) = plan.updates(step, step, lambda file, which: [])
        taken += [item.group for item in load_rollouts(update.file)[0]]
    epochs = [taken[at : at + 8] for at in range(0, 24, 8)]
    assert len({*taken}) == 8
    assert [sorted(own) for own in epochs] == [sorted({*taken})] * 3
    assert len({tuple(own) for own in epochs}) == 3
    assert [name for name in taken if zlib.crc32(name.removeprefix("arithmetic/").encode()) % 10 == 0] == []


def test_the_reward_of_an_episode_stands_on_its_last_turn_alone(tmp_path):
    rollouts = EngineRollouts(config_of(tmp_path, TURNED), open_checkpoint(write_tiny("add", tmp_path)))
    rollouts._reward = Reward()  # type: ignore[assignment]
    turns = [Turn(prompt=(2,), sample=Sample(tokens=(3, 4), logprobs=(-1.0, -1.0)), text="12") for _ in range(3)]
    (group,) = rollouts._scored(2, 0, (1,), [0], [[turns, turns[:1], turns[:2]]], []).groups
    assert [row.index for row in group] == [0, 1, 2, 0, 0, 1]
    assert [row.reward for row in group] == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def test_requests_in_flight_stop_for_an_update_after_as_many_tokens_as_the_config_says(tmp_path):
    words = ("grpo.mode=inflight", "grpo.inflight_steps=3", "grpo.max_staleness=1", "grpo.ratio_over=engine")
    rollouts = EngineRollouts(config_of(tmp_path, words), open_checkpoint(write_tiny("add", tmp_path)))
    asked: list[int] = []
    rollouts._client = SimpleNamespace(begin_batch=lambda prompts, sampling, steps: asked.append(steps))  # type: ignore[assignment]
    rollouts.begin(2)
    assert asked == [3]


def test_a_run_samples_from_as_many_examples_as_its_config_says(tmp_path):
    rollouts = EngineRollouts(config_of(tmp_path, ()), open_checkpoint(write_tiny("add", tmp_path)))
    assert len(rollouts._examples) == 20
