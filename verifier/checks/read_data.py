"""Held-out problems of a run, against the questions that it trains on."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import condition, on
from verifier.core.records_data import HeldOutRead

EVALUATED = condition("no problem is held out in this step", lambda run: run.facts.evaluated)


@check("DAT011", needs=(HeldOutRead,), applies=on(step=EVALUATED))
def other_problems_held_out(trace: Trace) -> Iterator[Comparison]:
    """No problem of the evaluation is a question that is trained on.

    What it checks: the question of each problem against those of all examples to train on.
    Why it matters: an evaluation on what is trained on rises with it, and says nothing of other questions.
    Evidence: data/evaluated, on the first step after a start and on each that is followed by an evaluation.
    Tolerance and its source: exact; digests of 64 bits.
    Where to look: the split that the evaluation reads.
    What it does not catch: questions that differ by a space; tokens of the problems (DAT013).
    References: OpenRLHF#1089.
    """
    for item in trace.of(HeldOutRead):
        for name, row in zip(item.ids, trace.array(item).tolist(), strict=True):
            sentence = f"the question of `{name}`, a problem of the evaluation, is example {row} of the training set"
            yield compare_value(
                item, f"{name} (trained on)", f"example {row}", "no example", same=row < 0, sentence=sentence
            )
