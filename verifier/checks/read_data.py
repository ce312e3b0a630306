"""Data as the loader read them: examples, held-out problems and recorded rollouts, against a second reader's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from verifier.checks.conditions import GRPO, LIVE, SFT
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import condition, knob, on
from verifier.core.records_data import ExamplesRead, HeldOutRead, RolloutsRead, RowsRead
from verifier.core.records_policy import Advantages, Drops, GivenRewards, PolicyColumns
from verifier.core.records_tokens import GivenRoutes, Rollouts
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("DAT010", needs=(ExamplesRead,), applies=on(step=SFT | LIVE))
def example_differs_from_source(trace: Trace) -> Iterator[Comparison]:
    """The examples of a step are the rows of their source, whole, and the data set has all rows that were asked for.

    What it checks: per example, digests of its id, its question, its prompt with all messages and their roles, its
    response, its gold answer and its further columns against those of the row at its index, which a second reader
    finds by the run's names of columns: plain JSON of the lines of a file, Parquet or Arrow files by pyarrow, a closed
    form of generated arithmetic. A conversation whose template changes earlier turns is a row for each answer. The
    number of examples against the number of rows, or `data.num_examples`; a run leaves out no row of its own accord.
    Why it matters: a loader that shuffles answers apart from prompts, loses a message, or leaves out long rows hands on
    examples that are well formed; all that is compared with them later is wrong alike.
    Evidence: data/read.
    Tolerance and its source: exact; digests of 64 bits of copies.
    What it does not catch: rows that are wrong in the source; a tokenizer or a template that is wrong (DAT009).
    References: open-instruct#1484, miles#558, verl#502, axolotl#3824.
    """
    for item in trace.of(ExamplesRead):
        yield from _compared(trace, item)


EVALUATED = condition("no problem is held out in this step", lambda run: run.facts.evaluated)


@check("DAT011", needs=(HeldOutRead,), applies=on(step=EVALUATED))
def other_problems_held_out(trace: Trace) -> Iterator[Comparison]:
    """The problems of the evaluation are the rows of the held-out source, and none is a question of the training set.

    What it checks: per problem, digests of its parts against those of its row, as DAT010 does; its question against all
    rows of the source of training, both as a second reader finds them; the number of problems.
    Why it matters: an evaluation on what is trained on rises with it, and says nothing of other questions.
    Evidence: data/evaluated, on the first step after a start and on each that is followed by an evaluation.
    Tolerance and its source: exact; digests of 64 bits of copies.
    What it does not catch: questions that differ by a space; tokens of the problems, which have no second reader.
    References: OpenRLHF#1089.
    """
    for item in trace.of(HeldOutRead):
        yield from _compared(trace, item)
        for name, row in zip(item.ids, trace.array(item, "trained").tolist(), strict=True):
            yield Comparison(
                what=f"{name} (trained on)", same=row < 0, stage=Stage.DATA, version=item.version, badness=1.0,
                sentence=f"the question of `{name}`, a problem of the evaluation, is row {row} of the training set",
                expected="no row of the training set (a second reader)", actual=f"row {row}", allowed="none",
                hint="look at the split that the evaluation reads",
            )  # fmt: skip


def _compared(trace: Trace, item: RowsRead) -> Iterator[Comparison]:
    """Number of examples and their parts, against the rows of the source."""
    yield Comparison(
        what=f"number of {item.name}", same=item.num_examples == item.num_rows, stage=Stage.DATA, version=item.version,
        badness=1.0,
        sentence=f"{item.num_examples:,} examples of `{item.source}` were read, it has {item.num_rows:,}",
        expected=f"{item.num_rows:,} (a second reader)", actual=f"{item.num_examples:,}", allowed="exact (counts)",
        hint="look at what the loader leaves out",
    )  # fmt: skip
    arrays = trace.arrays(item)
    differs = arrays["used"] != arrays["read"]
    rows = zip(item.ids, arrays["indices"].tolist(), differs, arrays["found"].tolist(), strict=True)
    for at, (name, index, wrong, found) in enumerate(rows):
        parts = [f"{part}{_whence(row)}" for part, bad, row in zip(item.parts, wrong, found, strict=True) if bad]
        yield Comparison(
            what=f"{name} ({item.name} {at})", same=not parts, stage=Stage.DATA, version=item.version,
            badness=float(len(parts)),
            sentence=f"`{name}` does not have the {_joined(list(_names(item.parts, wrong)))} of row {index} of its "
            "source",
            expected=f"row {index} of `{item.source}` (a second reader)", actual=", ".join(parts) or "the same",
            allowed="exact (digests of 64 bits)",
            hint="look at what the loader shuffles, cuts or leaves out, and at the order of the source's files",
        )  # fmt: skip


def _names(parts: tuple[str, ...], wrong: np.ndarray) -> Iterator[str]:
    return (part for part, bad in zip(parts, wrong, strict=True) if bad)


def _joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _whence(row: int) -> str:
    return " of no row" if row < 0 else f" of row {row}"


RECORDED = condition("rollouts are sampled", lambda run: knob(run, "data.rollouts") is not None)


@check("DAT012", needs=(RolloutsRead, Advantages, PolicyColumns), applies=on(step=GRPO & RECORDED))
def recorded_rollout_differs_from_file(trace: Trace) -> Iterator[Comparison]:
    """A step on recorded rollouts trains on all that its file has, as the file has it, the loss mask included.

    What it checks: per rollout of the step's file, as plain JSON has it: group, trajectory and reward against those
    that the advantage is of; text and gold answer; its mark of having been cut off against that which filters read;
    loss mask before any filter, log-probabilities and versions of sampled tokens against the inputs of the loss;
    tokens, prompt length, marks of sampled tokens and loss mask against what ranks packed, where a rollout that was
    dropped has no token in the loss; routes against those that the trainer's routers are given. Rollouts both ways.
    Where the reward alone differs, it was given after the file was read, in stage reward.
    Why it matters: a field that is not passed on has a default: all sampled tokens are in the loss, a reward is 0, and
    the loss falls.
    Evidence: data/recorded, advantage/advantages, advantage/policy, reward/rewards, pack/rollouts, replay/routes,
    data/drops.
    Tolerance and its source: exact; copies, log-probabilities as float32. Files come in the order of the numbers in
    their names, 2 before 10.
    What it does not catch: what is wrong in the file.
    References: slime#1205, NeMo-RL#3837, prime-rl#1807, OpenNMT-py#1755, litData#829.
    """
    for item in trace.of(RolloutsRead):
        read, seen = _read(trace, item), set()
        for what, name, wrong in _found(trace, item.version, read):
            seen.add(name)
            stage = Stage.REWARD if wrong == ["reward"] else Stage.DATA
            yield Comparison(
                what=f"{name} ({what})", same=not wrong, stage=stage, version=item.version, badness=1.0,
                sentence=f"rollout `{name}` does not have the {_joined(wrong) if wrong else ''} of its file in its "
                f"{what}",
                expected="those of the file (a second reader)", actual=f"other {_joined(wrong)}" if wrong else "those",
                allowed="exact (copies)", hint="look at what makes a rollout of a row, field by field",
            )  # fmt: skip
        for name in sorted(read.keys() - seen):
            yield Comparison(
                what=f"{name} (in the batch)", same=False, stage=Stage.DATA, version=item.version, badness=1.0,
                sentence=f"rollout `{name}` of the step's file is not in its batch",
                expected="all rollouts of the file", actual="absent", allowed="exact (names)",
                hint="look at what filters the rows of a file",
            )  # fmt: skip


def _read(trace: Trace, item: RolloutsRead) -> dict[str, dict[str, Any]]:
    """Fields of each rollout of a file, by id."""
    columns = {name: ragged.split(values, item.lengths) for name, values in trace.arrays(item).items()}
    lists = {
        "group": item.groups, "trajectory": item.trajectories, "reward": item.rewards, "text": item.texts,
        "answer": item.answers, "mark of having been cut off": item.truncated, "prompt length": item.prompt_lengths,
        **columns,
    }  # fmt: skip
    return {name: {field: lists[field][at] for field in lists} for at, name in enumerate(item.ids)}


def _found(
    trace: Trace, version: int, read: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, list[str]]]:  # fmt: skip
    """(What has it, rollout, names of the fields that differ from the file's) wherever a step has a rollout."""
    dropped = {
        name
        for item in trace.of(Drops, version=version)
        for name, reason in zip(item.ids, item.reasons, strict=True)
        if reason
    }
    for drops in trace.of(Drops, version=version):
        yield from _each("filters", drops.ids, {"mark of having been cut off": drops.truncated}, read)
    for given in trace.of(Advantages, version=version):
        fields: dict[str, Any] = {"group": given.groups, "trajectory": given.trajectories, "reward": given.rewards}
        yield from _each("advantage", given.ids, fields, read)
    for rewards in trace.of(GivenRewards, version=version):
        fields = {"text": rewards.texts, "answer": rewards.answers, "reward": rewards.rewards}
        yield from _each("reward", rewards.ids, fields, read)
    for policy in trace.of(PolicyColumns, version=version):
        names = {"own": "mask", "engine": "logprobs", "version": "versions"}
        columns = {field: ragged.split(trace.array(policy, name), policy.lengths) for name, field in names.items()}
        yield from _each("loss", policy.ids, columns, read)
    for packed in trace.of(Rollouts, version=version):
        columns = {
            name: ragged.split(trace.array(packed, name), packed.lengths) for name in ("tokens", "sampled", "mask")
        }
        fields = {"group": packed.groups, "prompt length": packed.prompt_lengths, **columns}
        yield from _each(packed.name, packed.ids, fields, read, dropped)
    for routed in trace.of(GivenRoutes, version=version):
        rows = trace.array(routed)
        layers = np.unique(rows[:, 2])
        parts = [
            _in_places(rows[rows[:, 0] == at, 1:], layers, read.get(name)) for at, name in enumerate(routed.rollouts)
        ]
        yield from _each(f"replay of {routed.name}", routed.rollouts, {"routes": parts}, read)


def _in_places(rows: np.ndarray, layers: np.ndarray, own: dict[str, Any] | None) -> np.ndarray:
    """Routes where a rollout's file has them, -1 where there are none; the rows themselves if they do not fit."""
    if own is None or "routes" not in own:
        return rows
    found = np.full_like(own["routes"], -1)
    position, column, experts = rows[:, 0], np.searchsorted(layers, rows[:, 1]), rows[:, 2:]
    if (len(layers), experts.shape[1]) != found.shape[1:] or position.max(initial=0) >= len(found):
        return rows
    found[position, column] = experts
    return found


def _each(
    what: str, ids: tuple[str, ...], fields: dict[str, Any], read: dict[str, dict[str, Any]],
    dropped: frozenset[str] | set[str] = frozenset(),
) -> Iterator[tuple[str, str, list[str]]]:  # fmt: skip
    """The rollouts of one record; those that were dropped have an empty mask."""
    for at, name in enumerate(ids):
        own = read.get(name)
        if own is None:
            yield what, name, ["id"]
            continue
        wrong = []
        for field, values in fields.items():
            found, expected = values[at], own.get(field, ())
            if field == "mask" and name in dropped:
                expected = np.zeros(len(found), bool)
            if field in ("logprobs", "versions") and len(found) == len(expected):
                found, expected = found[own["sampled"]], expected[own["sampled"]]
            if not np.array_equal(found, expected):
                wrong.append(field)
        yield what, name, wrong
