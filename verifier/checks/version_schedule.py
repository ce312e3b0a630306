"""Versions that the sampled tokens of a step name, against the schedule by which the run's mode samples ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from verifier.checks.conditions import LIVE
from verifier.checks.named_weights import compare_answers
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import on
from verifier.core.records_policy import PolicyColumns, SamplingAsked
from verifier.core.records_trainer import PreviousStep
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.knob import flat


class _Schedule(NamedTuple):
    """Schedule of one step of a run."""

    mode: str
    trained: int
    """Version of the weights that the step trains."""
    steps: int
    """Engine steps of a batch before new weights reach it."""
    begins: bool
    """The step is the first of its process, which may have no batch that was sampled ahead."""
    updated: bool
    """The step before it took an update, so that its batch met new weights on its way; also where nothing says so."""


@check("DAT015", needs=(SamplingAsked, PolicyColumns, PreviousStep), applies=on(step=LIVE))
def version_of_another_schedule(trace: Trace) -> Iterator[Comparison]:
    """Sampled tokens are of the weights that the run's mode samples them by, and claim those that sampled them.

    What it checks: per rollout of a live step k, the versions that its tokens name. In `sync` all are k - 1; in `async`
    all are k - 2. In `inflight` they are k - 2 and then k - 1: not more of the older ones than the engine steps after
    which new weights reach a batch, one token a step, and none behind a newer one; answers of further rounds are k - 1.
    Where the step before took no update, all are k - 2. The first step of a process may have no batch from before, and
    then all its answers are k - 1.
    And per answer, the version that each token claims against the one that the engine's own process says it held when
    it sampled the token: the version that came with its last completed update. A step without an update sends nothing,
    so its version is sampled by the weights that were sent last before it.
    Why it matters: a rollout that is stamped one version too old is dropped too early, and is compared with nobody's
    weights between sampled steps. Answers that are sampled further ahead than was asked for, or whose requests no new
    weights reach, are that much staler, and every token still has its right log-probability. Answers that are sampled
    before a sync, and claim the version after it, are trained as if on-policy; in bf16 one update of the weights moves
    a log-probability by less than noise.
    Evidence: advantage/policy ("version"), train/previous (whether the step before took an update), data/seeds
    ("weights"), data/asked ("sent"), the manifest's config.
    Tolerance and its source: exact; versions are copied, and what is sampled depends on seed and step alone.
    What it does not catch: a transfer that brings other weights than its version says (WGT020, ENG001), or weights that
    change after it (ENG008, ENG009); of engines that get adapters, which adapter (LGP011); in flight, new weights that
    reach a batch too early, and answers of further rounds in the first step of a process; in the first step after a
    resume, older weights than a batch from before claims.
    References: prime-rl#1764, rllm#622, cosmos-rl#592.
    """
    config = flat(trace.manifest.config)
    mode = config.get("grpo.mode")
    for asked in trace.of(SamplingAsked) if mode is not None else ():
        before = next(trace.of(PreviousStep, version=asked.version - 1), None)
        for policy in trace.of(PolicyColumns, version=asked.version):
            schedule = _Schedule(
                mode=str(mode), trained=policy.trained_version,
                steps=int(config.get("grpo.inflight_steps") or max(1, asked.max_answer_tokens // 2)),
                begins=before is None or not before.here, updated=before is None or before.updated,
            )  # fmt: skip
            columns = ragged.split(trace.array(policy, "version"), policy.lengths)
            drawn = [versions[versions >= 0] for versions in columns]
            anew = schedule.begins and all(bool((own == schedule.trained).all()) for own in drawn)
            for name, own in zip(policy.ids, drawn, strict=True):
                yield _named(policy, schedule, name, own, anew=anew)
                if mode == "inflight" and not anew:
                    yield _reached(policy, schedule, name, own)
            yield from compare_answers(trace, asked, policy)


def _named(policy: PolicyColumns, schedule: _Schedule, name: str, own: np.ndarray, *, anew: bool) -> Comparison:
    """Versions of a rollout against those that the mode allows."""
    may = {schedule.trained}
    if schedule.mode != "sync" and not anew:
        may = {schedule.trained - 1}
        if schedule.mode == "inflight" and schedule.updated:
            further = "." in name.partition("/")[0]
            may = {schedule.trained} if further and not schedule.begins else {*may, schedule.trained}
    found = sorted({*own.tolist()})
    return Comparison(
        what=f"versions of {name}", same=may.issuperset(found), stage=Stage.DATA, version=policy.version, badness=1.0,
        sentence=f"tokens of `{name}` are stamped with the versions {found}, grpo.mode={schedule.mode} samples them by "
        f"{sorted(may)}",
        expected=f"{sorted(may)} (the schedule of grpo.mode={schedule.mode})", actual=f"{found}",
        allowed="exact (versions are copied)", hint="look at what counts versions, and at how far ahead is sampled",
    )  # fmt: skip


def _reached(policy: PolicyColumns, schedule: _Schedule, name: str, own: np.ndarray) -> Comparison:
    """Older tokens of a rollout that new weights should have reached."""
    most = schedule.steps if schedule.updated else len(own)
    old = own < schedule.trained
    late = bool((np.diff(own) < 0).any())
    return Comparison(
        what=f"older tokens of {name}", same=int(old.sum()) <= most and not late, stage=Stage.ROLLOUT,
        version=policy.version, badness=1.0, owner="engine",
        sentence=f"{int(old.sum())} tokens of `{name}` are of older weights"
        + (", some behind newer ones" if late else f", which new ones reach after {most} engine steps"),
        expected=f"{most} at most (grpo.inflight_steps), before all newer ones", actual=f"{int(old.sum())}",
        allowed="exact (an engine step samples a token)",
        hint="look at when requests stop for an update, and at whether they go on with the new weights",
    )  # fmt: skip
