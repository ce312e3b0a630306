"""Answers that came back from an engine: as many as were asked of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from verifier.checks.conditions import LIVE
from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import on, recorded, told
from verifier.core.records_policy import Advantages, SamplingAsked


@check(
    "DAT007",
    needs=(SamplingAsked, Advantages),
    applies=on(
        step=LIVE,
        loop=recorded(SamplingAsked, Advantages) & told("sizes", "the loop does not say how many answers it asks for"),
    ),
)
def step_of_another_size(trace: Trace) -> Iterator[Comparison]:
    """A live batch has the prompts, and of each prompt the answers, that were asked of the engine.

    What it checks: the number of prompts with an answer, and the number of answers to each, where the turns of a
    trajectory are one answer, against what the step asked of the engine.
    Why it matters: an answer that is lost on its way changes the group that its advantages are relative to. All other
    counts are then those of what was left, and agree.
    Evidence: data/asked, advantage/advantages.
    Tolerance and its source: exact; these are counts.
    Where to look: what loses answers of the engine.
    What it does not catch: recorded rollouts; which groups further rounds of sampling replace.
    References: labs-molt#109, SkyRL#1529.
    """
    for asked in trace.of(SamplingAsked):
        for given in trace.of(Advantages, version=asked.version):
            answers: dict[str, set[str]] = defaultdict(set)
            for group, trajectory in zip(given.groups, given.trajectories, strict=True):
                answers[group].add(trajectory)
            counts = [("prompts with an answer", len(answers), asked.batch_size)]
            counts += [(f"answers to prompt `{group}`", len(own), asked.group_size) for group, own in answers.items()]
            for what, actual, expected in counts:
                says = "", f"batch size {asked.batch_size}, {asked.group_size} answers"
                yield compare_value(
                    asked, what, actual, expected, subject=f"the number of {what} in the step", says=says
                )
