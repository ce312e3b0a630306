"""Held-out problems of a run, against the questions that it trains on."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.check import Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import condition, on, recorded
from verifier.stages.checks_conditions import EXAMINED
from verifier.stages.data.records import HeldOutRead
from verifier.stages.rollout.records import EvaluatedAnswers

EVALUATED = condition("no problem is held out in this step", lambda run: run.facts.evaluated)


@check("DAT011", needs=(HeldOutRead,), applies=on(step=EVALUATED, loop=recorded(HeldOutRead)))
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


@check(
    "DAT016",
    needs=(HeldOutRead, EvaluatedAnswers),
    applies=on(step=EXAMINED & EVALUATED, loop=recorded(HeldOutRead, EvaluatedAnswers)),
)
def evaluation_asks_other_problems(trace: Trace) -> Iterator[Comparison]:
    """An evaluation asks the problems that are held out, each once.

    What it checks: of up to 8 answers of an evaluation, others in each, the id of the problem that the engine was asked
    against the ids of the held-out problems, as they were read from the data set.
    Why it matters: an evaluation of other problems, such as those that are trained on, or of one of them again and
    again, is a number with a right name. Curves and the choice of a checkpoint rest on it.
    Evidence: data/evaluated, rollout/evaluated.
    Tolerance and its source: exact (ids).
    Where to look: which data set the prompts of an evaluation are taken from.
    What it does not catch: held-out problems that are trained on (DAT011), other tokens of a problem (DAT013), answers
    that were not kept.
    References: tensorflow/ranking#350.
    """
    held = {name for item in trace.of(HeldOutRead) for name in item.ids}
    for item in trace.of(EvaluatedAnswers):
        places: dict[str, str] = {}
        for answer in item.ids:
            kind, _, rest = answer.partition(" ")
            place, problem = rest.split("/", 2)[1], rest.split("/", 3)[3]
            problem = problem if problem in held else problem.rpartition("/")[0] or problem  # a turn of several
            first = places.setdefault(f"{kind} {problem}", place)
            wrong = "is none of the held-out ones" if problem not in held else "is asked twice" * (first != place)
            sentence = f"`{problem}`, a problem of the evaluation of version {item.version}, {wrong}"
            sides = f"`{problem}` at place {place}", f"each of {len(held):,} problems once"
            yield compare_value(item, answer, *sides, same=not wrong, sentence=sentence, stage=Stage.DATA, owner="")
