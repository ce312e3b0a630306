"""GRPO with a live vLLM and a calculator: episodes of several turns, as one rollout and step by step.

What this does not exercise: the reward that a whole run reaches, and the bugs that DAT006 catches (tests/faults).
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.test_train_modes import require_held, train
from verifier.core import store
from verifier.core.trace import Trace
from verifier.stages.advantage.records import Advantages, PolicyColumns
from verifier.stages.data.records import EpisodeTurns
from verifier.stages.pack.records import Rollouts

STEPS = 3
ECHO = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "data.source=calculator", "data.batch_size=4",
    "grpo.group_size=4", "grpo.max_answer_tokens=32", "grpo.environment=verifier.faults.echo:Echo", "grpo.max_turns=3",
    "grpo.entropy_weight=0.05", "grpo.reward=operator:gt", "evaluation.num_problems=0", "verify.steps=true",
    "verify.every=1",
)  # fmt: skip
SHAPES = {"one": (), "step-wise": ("grpo.step_wise=true",), "async": (
    "grpo.mode=async", "grpo.max_staleness=1", "grpo.ratio_over=engine"
)}  # fmt: skip

EACH = [pytest.param(name, marks=[] if name == "step-wise" else [pytest.mark.slow]) for name in SHAPES]


@pytest.fixture(scope="module")
def run(resources, tmp_path_factory):
    found: dict[str, Path] = {}

    def once(name: str) -> Path:
        if name not in found:
            found[name] = train(resources, tmp_path_factory.mktemp("tools") / "run", [*ECHO, *SHAPES[name]])
        return found[name]

    return once


def traces(folder: Path) -> list[Trace]:
    return [store.read(folder / "steps" / f"{step:06d}") for step in range(1, STEPS + 1)]


def turns(trace: Trace) -> dict[str, list[tuple[tuple[int, ...], ...]]]:
    """Prompt, sampled tokens and reply of each turn of each episode."""
    (item,) = trace.of(EpisodeTurns)
    found: dict[str, list[tuple[tuple[int, ...], ...]]] = {}
    for name, *row in zip(item.episodes, item.prompts, item.sampled, item.replies, strict=True):
        found.setdefault(name, []).append(tuple(row))
    return found


@pytest.mark.parametrize("name", EACH)
def test_every_step_holds(name, run):
    fresh = () if name == "async" else ("LGP009",)  # later batches of that mode are a version behind
    require_held(run(name), "DAT006", "LGP003", "ADV002", "PCK001", *fresh)


@pytest.mark.parametrize("name", EACH)
def test_prompts_of_later_turns_begin_with_all_earlier_ids(name, run):
    later = 0
    for trace in traces(run(name)):
        for own in turns(trace).values():
            for before, after in pairwise(own):
                assert after[0] == sum(before, ())
                assert before[2]
                later += 1
            assert not own[-1][2]
    assert later > STEPS


def test_what_the_tool_says_is_out_of_the_loss(run):
    for trace in traces(run("one")):
        (policy,) = trace.of(PolicyColumns)
        masks = np.split(trace.array(policy, "mask"), np.cumsum(policy.lengths)[:-1])
        versions = np.split(trace.array(policy, "version"), np.cumsum(policy.lengths)[:-1])
        for name, mask, version in zip(policy.ids, masks, versions, strict=True):
            own = turns(trace)[name]
            assert len(mask) == len(own[-1][0]) + len(own[-1][1])
            assert (version >= 0).sum() == sum(len(sampled) for _, sampled, _ in own) == mask.sum()


def test_steps_share_the_advantage_of_their_episode(run):
    for trace in traces(run("step-wise")):
        (item,) = trace.of(Advantages)
        found: dict[str, set[float]] = {}
        for name, value in zip(item.trajectories, item.advantages, strict=True):
            found.setdefault(name, set()).add(value)
        assert len(found) == 16
        assert all(len(values) == 1 for values in found.values())
        assert len(item.ids) == sum(len(own) for own in turns(trace).values()) > 16
        assert {name for rollouts in trace.of(Rollouts) for name in rollouts.ids} <= {*item.ids}


def test_metrics_count_episodes(run):
    one, steps = (
        json.loads((run(name) / "metrics.jsonl").read_text().splitlines()[0]) for name in ("one", "step-wise")
    )
    for name in ("reward", "answer_tokens", "truncated_share", "mixed_groups", "turns"):
        assert one[name] == steps[name]
    assert one["turns"] > 1
