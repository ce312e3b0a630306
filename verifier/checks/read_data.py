"""Held-out problems of a run, against the questions that it trains on."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import condition, on, recorded
from verifier.core.records_data import HeldOutRead
from verifier.core.stage import Stage
from verifier.core.trace import Trace

EVALUATED = condition("no problem is held out in this step", lambda run: run.facts.evaluated)


@check("DAT011", needs=(HeldOutRead,), applies=on(step=EVALUATED, loop=recorded(HeldOutRead)))
def other_problems_held_out(trace: Trace) -> Iterator[Comparison]:
    """No problem of the evaluation is a question that is trained on.

    What it checks: the question of each problem against those of all examples to train on.
    Why it matters: an evaluation on what is trained on rises with it, and says nothing of other questions.
    Evidence: data/evaluated, on the first step after a start and on each that is followed by an evaluation.
    Tolerance and its source: exact; digests of 64 bits.
    What it does not catch: questions that differ by a space; tokens of the problems (DAT013).
    References: OpenRLHF#1089.
    """
    for item in trace.of(HeldOutRead):
        for name, row in zip(item.ids, trace.array(item).tolist(), strict=True):
            yield Comparison(
                what=f"{name} (trained on)", same=row < 0, stage=Stage.DATA, version=item.version, badness=1.0,
                sentence=f"the question of `{name}`, a problem of the evaluation, is example {row} of the training set",
                expected="no example of the training set", actual=f"example {row}", allowed="none",
                hint="look at the split that the evaluation reads",
            )  # fmt: skip
