"""Numbers of an evaluation, against what was found of each held-out problem."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verifier.checks.content import times
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.record import Real
from verifier.core.records_policy import GivenRewards, RunSummary, SolvedProblems, WrittenMetrics
from verifier.core.stage import Stage
from verifier.core.trace import Trace

MEAN = Tolerance(absolute=1e-9, unit="of the greatest reward", source="float64: the same numbers in another order")
PREFIX = "held-out "
"""Before the name of the number, in the name of the rewards that it is a mean of."""


@check("MET003", needs=(WrittenMetrics, GivenRewards | SolvedProblems), scope="measured")
def evaluation_misreported(trace: Trace) -> Iterator[Comparison]:
    """The numbers of an evaluation are means over all held-out problems, each counted once, of what was found of each.

    What it checks: `accuracy` and `held_out_reward` in the line of metrics of the step that was evaluated, or of step 1
    after an evaluation before it: each of as many problems as the config asks for has one reward, and the number is
    their mean. In fine-tuning, `accuracy` is the share of problems that were solved; each problem is scored once more
    by the same weights in the same micro-batches: it is solved just if no token of its response is below the greatest
    logit, and an evaluation before step 1 has found all of them before the first update. And `held_out_version` is the
    step, or 0.
    Why it matters: an evaluation that pads its last batch with problems that it has had, drops the rest, or averages
    means of batches is off by little, and checkpoints are chosen by little.
    Evidence: loss/written, reward/rewards ("held-out ..."), loss/solved, and the manifest's config.
    Tolerance and its source: 1e-9 of the greatest reward; what is solved is exact, the same logits give it.
    What it does not catch: rewards that are wrong themselves (RWD001); answers of other weights (LGP015); an evaluation
    at the end alone, of which no line has numbers (MET004).
    References: AReaL#1100, AReaL#1636, accelerate#125, SkyRL#317, verl#78.
    """
    asked = _asked(trace.manifest.config)
    for line in trace.of(WrittenMetrics):
        evaluated = 0 if line.version == 1 and _begins(trace.manifest.config) else line.version
        for item in trace.of(GivenRewards, version=evaluated):
            if item.name.startswith(PREFIX):
                yield _counted(item, len(item.rewards), asked, Stage.REWARD)
                mean = math.fsum(item.rewards) / max(len(item.rewards), 1)
                scale = max(map(abs, item.rewards), default=1.0)
                number = item.name.removeprefix(PREFIX)
                yield _mean(evaluated, number, _number(line, number), mean, scale, Stage.REWARD, "metrics.jsonl")
        yield from _fine_tuned(trace, evaluated, _number(line, "accuracy"), asked, "metrics.jsonl")
        shown = line.values.get("held_out_version", "absent")
        yield Comparison(
            what="held_out_version", same=shown == evaluated, stage=Stage.LOSS, version=line.version, badness=1.0,
            sentence=f"the line of step {line.version} in metrics.jsonl has held_out_version {shown}",
            expected=f"{evaluated} (the step that was evaluated)", actual=f"{shown} (the file)",
            allowed="exact (a count)", hint="look at what labels the metrics of an evaluation",
        )  # fmt: skip


@check("MET004", needs=(RunSummary, WrittenMetrics), scope="told")
def summary_misreported(trace: Trace) -> Iterator[Comparison]:
    """The loss and the accuracy that a run tells at its end are those of its last step and its last evaluation.

    What it checks: the loss against the last line of metrics, where that has one. That there is an accuracy just if
    there are held-out problems. The accuracy against that line where it has the evaluation, which is to be of the last
    step's weights: that before the only step is not. Of an evaluation at the end alone, in float32 and beside an engine
    that is awake, the accuracy against the mean of what was found of each held-out problem, as MET003.
    Why it matters: these two numbers are what is read of a run, and by default no other accuracy is told. It is higher
    where the problems that fail are left out of it.
    Evidence: loss/summary, loss/written, reward/rewards ("held-out accuracy"), loss/solved, and the manifest's config.
    Tolerance and its source: bitwise of what is copied; as MET003.
    What it does not catch: the end of a run whose last step had no token in the loss; see MET003.
    References: rllm#382, open-instruct#661.
    """
    asked = _asked(trace.manifest.config)
    for item in trace.of(RunSummary):
        for line in trace.of(WrittenMetrics, version=item.version):
            pairs = [("loss", item.loss)]
            if item.accuracy is not None and not item.alone:
                pairs.append(("accuracy", item.accuracy))
            yield from (_told(item, name, told, line.values[name]) for name, told in pairs if name in line.values)
            evaluated = line.values.get("held_out_version", item.version)
            if len(pairs) > 1:
                yield Comparison(
                    what="weights of the accuracy", same=evaluated == item.version, stage=Stage.LOSS,
                    version=item.version, badness=1.0,
                    sentence=f"the run of {item.version} steps ends with the accuracy of version {evaluated}",
                    expected=f"{item.version} (the last step)", actual=f"{evaluated} (metrics.jsonl)",
                    allowed="exact (a count)", hint="look at which evaluation the end of a run tells",
                )  # fmt: skip
        if (right := _is_due(trace.manifest.config)) is not None:
            yield Comparison(
                what="accuracy of the run", same=(item.accuracy is not None) == right, stage=Stage.LOSS,
                version=item.version, badness=1.0,
                sentence=f"the run ends with accuracy {item.accuracy}, and has {asked or 0:,} held-out problems",
                expected="a number" if right else "none", actual=f"{item.accuracy} (the run's summary)",
                allowed="exact", hint="look at what evaluates the weights of the last step",
            )  # fmt: skip
        if not item.alone or item.accuracy is None:
            continue
        for given in trace.of(GivenRewards, version=item.version, name=f"{PREFIX}accuracy"):
            yield _counted(given, len(given.rewards), asked, Stage.LOSS)
            mean = math.fsum(given.rewards) / max(len(given.rewards), 1)
            scale = max(map(abs, given.rewards), default=1.0)
            yield _mean(item.version, "accuracy", float(item.accuracy), mean, scale, Stage.LOSS, "the run's summary")
        yield from _fine_tuned(trace, item.version, float(item.accuracy), asked, "the run's summary")


def _fine_tuned(trace: Trace, version: int, shown: float, asked: int | None, by: str) -> Iterator[Comparison]:
    """Compare an accuracy of fine-tuning with what was found of each held-out problem."""
    for found in trace.of(SolvedProblems, version=version):
        yield _counted(found, len(found.solved), asked, Stage.LOSS)
        yield from _solved(trace, found)
        mean = sum(found.solved) / max(len(found.solved), 1)
        yield _mean(version, "accuracy", shown, mean, 1.0, Stage.LOSS, by)


def _is_due(config: Mapping[str, Any]) -> bool | None:
    """True if a run has problems to evaluate; None where its config does not tell."""
    asked, data = _asked(config), config.get("data")
    return None if asked is None or not isinstance(data, Mapping) else bool(asked) and data.get("rollouts") is None


def _begins(config: Mapping[str, Any]) -> bool:
    """True if a run evaluates the weights that it begins with, too."""
    evaluation = config.get("evaluation")
    return isinstance(evaluation, Mapping) and int(str(evaluation.get("every", 0))) > 1


def _told(item: RunSummary, name: str, told: Real, right: Real) -> Comparison:
    return Comparison(
        what=f"{name} of the run", same=told == right, stage=Stage.LOSS, version=item.version, badness=1.0,
        sentence=f"the run ends with {name} {told}, its last line of metrics has {right}",
        expected=f"{right} (metrics.jsonl)", actual=f"{told} (the run's summary)", allowed="bitwise (a copy)",
        hint="look at which step's numbers the end of a run tells",
    )  # fmt: skip


def _asked(config: Mapping[str, Any]) -> int | None:
    """Held-out problems that a run's config asks for; None where it names none."""
    evaluation = config.get("evaluation")
    return int(str(evaluation["num_problems"])) if isinstance(evaluation, Mapping) else None


def _counted(item: GivenRewards | SolvedProblems, count: int, asked: int | None, stage: Stage) -> Comparison:
    own = len(set(item.ids))
    problems = own if asked is None else asked
    return Comparison(
        what=f"problems of {item.name}", same=count == own == problems == len(item.ids), stage=stage,
        version=item.version, badness=1.0,
        sentence=f"the evaluation counts {count:,} answers, there are {problems:,} held-out problems",
        expected=f"{problems:,}, each once", actual=f"{count:,}, of {own:,} problems", allowed="exact (counts)",
        hint="look at what pads, cuts or repeats the problems of an evaluation, and at when it is made",
    )  # fmt: skip


def _number(line: WrittenMetrics, name: str) -> float:
    return float(line.values.get(name, math.nan))


def _mean(version: int, number: str, shown: float, right: float, scale: float, stage: Stage, by: str) -> Comparison:
    gap, allowed = abs(shown - right), MEAN.absolute * max(scale, 1e-300)
    return Comparison(
        what=number, same=gap <= allowed, stage=stage, version=version, share=times(gap, allowed),
        sentence=f"the evaluation of step {version} shows {number} {shown:.6g}, it is {right:.6g}",
        expected=f"{right:.6g} (the mean over all problems)", actual=f"{shown:.6g} ({by})",
        allowed=f"{allowed:.3g}, {MEAN}", hint="look at what the number is summed over and divided by",
    )  # fmt: skip


def _solved(trace: Trace, item: SolvedProblems) -> Iterator[Comparison]:
    masks, shortfalls = (ragged.split(trace.array(item, name), item.lengths) for name in ("mask", "shortfall"))
    words = {True: "solved", False: "not solved"}
    for name, found, mask, below in zip(item.ids, item.solved, masks, shortfalls, strict=False):
        short = below[mask.astype(bool)]
        right = bool((short == 0).all())
        most = float(np.max(short, initial=0.0))
        yield Comparison(
            what=name, same=found == right, stage=Stage.LOSS, version=item.version, badness=1.0,
            sentence=f"`{name}` counts as {words[found]}, and is {words[right]}",
            expected=f"{words[right]} (a token of its response is up to {most:.3g} nats below the likeliest)",
            actual=f"{words[found]} (the evaluation)", allowed="exact (the same logits)",
            hint="look at which tokens of a problem the evaluation compares, and over which ranks",
        )  # fmt: skip
