"""Rows of the loss: inputs that it read for each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verifier.core import ragged
from verifier.core.check import LOOP, At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.checks_conditions import UPDATED
from verifier.stages.loss.records import LogitSpreads, LossRows
from verifier.stages.pack.checks_packing import POSITION_BITS

Rows = Mapping[str, np.ndarray]
INPUT = Tolerance(
    absolute=1e-6, unit="of the value", source="fp32: one rounding of a float64 is 6e-8, and a weight is multiplied"
)
READ = ("weight", "divisor", "advantage", "reference")
"""Columns of a token that a loss may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRows:
    """Rows in the loss of one update, of all ranks, and what they should have read."""

    columns: LossColumns
    place: np.ndarray
    """[T] token of the update that each row predicts."""
    rollout: np.ndarray
    """[T] rollout that it belongs to."""
    rows: Rows
    """Rows as the ranks recorded them."""
    given: Rows
    """[T] inputs as the controller recorded them, float64."""
    in_loss: np.ndarray
    """[N] tokens of the update in the loss."""

    def of(self, rollouts: Sequence[int]) -> UpdateRows:
        """Rows of some rollouts alone, by their places."""
        kept, owner = np.isin(self.rollout, rollouts), np.repeat(range(len(self.columns.ids)), self.columns.lengths)
        rows, given = ({name: values[kept] for name, values in each.items()} for each in (self.rows, self.given))
        return replace(
            self, place=self.place[kept], rollout=self.rollout[kept], rows=rows, given=given,
            in_loss=self.in_loss & np.isin(owner, rollouts),
        )  # fmt: skip

    def log_ratios(self, loss: str) -> np.ndarray:
        """[T] log-ratio of each row to its divisor, float64, nats; of GSPO the mean of its sequence."""
        difference: np.ndarray = self.rows["current"].astype(np.float64) - self.given["divisor"]
        if loss != "gspo":
            return difference
        sums = np.bincount(self.rollout, difference) / np.maximum(np.bincount(self.rollout), 1)
        return np.asarray(sums[self.rollout])


def updates_of(trace: Trace) -> Iterator[UpdateRows]:
    """Updates of a step whose rows were recorded, in order."""
    for columns in trace.of(LossColumns):
        version, name = columns.version, columns.name
        spreads = {item.rank: trace.arrays(item) for item in trace.of(LogitSpreads, version=version, name=name)}
        found = [*trace.of(LossRows, version=version, name=name)]
        if trace.manifest.command == LOOP:  # each process has a batch of its own
            found = [item for item in found if item.rank == columns.rank]
        parts = [{**trace.arrays(item), **spreads.get(item.rank, {})} for item in found]
        if not parts:
            continue
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        kept = joined["mask"].astype(bool)
        rows = {name: values[kept] for name, values in joined.items()}
        sentinel = rows["sentinel"].astype(np.int64)
        rollout, position = (sentinel >> POSITION_BITS) - 1, sentinel & ((1 << POSITION_BITS) - 1)
        starts = np.concatenate([[0], np.cumsum(columns.lengths)])
        place = starts[rollout] + position
        mask = trace.array(columns, "mask").astype(bool)
        given = {"weight": trace.array(columns, "weight").astype(np.float64) * int(mask.sum())}
        for policy in trace.of(PolicyColumns, version=columns.version):
            if not {*columns.ids} <= {*policy.ids}:
                continue
            given |= _of_update(trace, policy, columns)
        given = {name: values[place] for name, values in given.items()}
        yield UpdateRows(columns=columns, place=place, rollout=rollout, rows=rows, given=given, in_loss=mask)


def _of_update(trace: Trace, policy: PolicyColumns, columns: LossColumns) -> dict[str, np.ndarray]:
    """Columns of the batch for the rollouts of one update, by id."""
    number = {name: place for place, name in enumerate(policy.ids)}
    found = {}
    for name in READ[1:]:
        if name in (arrays := trace.arrays(policy)):
            parts = ragged.split(arrays[name].astype(np.float64), policy.lengths)
            found[name] = np.concatenate([parts[number[own]] for own in columns.ids])
    return found


@check("PCK004", needs=(LossRows, LossColumns), applies=on(step=UPDATED, loop=recorded(LossRows, LossColumns)))
def loss_read_another_token(trace: Trace) -> Iterator[Comparison]:
    """Every token in the loss is read once, with the weight, divisor, advantage and reference that it was given.

    What it checks: per rollout of an update, over all ranks: the columns that the loss read at the row that predicts a
    token, against what the controller computed for that token by id; and that each token in the loss has one row.
    Why it matters: an advantage that is shifted by one, cut for another context-parallel rank or normalised once more
    on a data-parallel rank keeps every shape, and the loss looks as ever.
    Evidence: loss/rows, advantage/columns, advantage/policy.
    Tolerance and its source: 1e-6 of the value; a float64 is rounded to float32.
    Where to look: what packs, cuts and moves the columns of a batch.
    What it does not catch: columns that were computed wrongly (ADV001, ADV003).
    References: ms-swift#8427, prime-rl#583, SkyRL#1908, RL#2787.
    """
    for update in updates_of(trace):
        columns = update.columns
        times_read = np.bincount(update.place, minlength=len(update.in_loss))
        owners = np.repeat(np.arange(len(columns.ids)), columns.lengths)
        wrong = np.bincount(owners[times_read != update.in_loss], minlength=len(columns.ids))
        greatest = {name: _greatest_gaps(update, name) for name in update.given}
        for number, name in enumerate(columns.ids):
            rows = int(wrong[number])
            worst, which = float(rows), "rows" if rows else ""
            for column, gaps in greatest.items():
                if gaps[number] > max(worst, 1.0):
                    worst, which = float(gaps[number]), column
            share = None if rows else max((float(gaps[number]) for gaps in greatest.values()), default=0.0)
            found = f"{rows} tokens not once" if which == "rows" else f"another {which} than it was given"
            sentence = f"in {columns.name} the loss of `{name}` read {found}"
            at, sides = At(Stage.PACK, columns.version), (found, "each token once, with its own columns")
            texts: Given = {"badness": worst}
            what, same, words = f"{name} in {columns.name}", not which, str(INPUT)
            compared = compare_value(at, what, *sides, same=same, sentence=sentence, allowed=words, **texts)
            yield replace(compared, share=share)


def _greatest_gaps(update: UpdateRows, column: str) -> np.ndarray:
    """[R] greatest gap between what the loss read of a column and what it was given, of each rollout, in `INPUT`."""
    wanted = update.given[column]
    read = update.rows[column].astype(np.float64) if column in update.rows else np.zeros(len(wanted))
    gaps = np.abs(read - wanted) / (INPUT.absolute * np.maximum(np.abs(wanted), 1e-30))
    greatest = np.zeros(len(update.columns.ids))
    np.maximum.at(greatest, update.rollout, np.where(np.isnan(gaps), np.inf, gaps))
    return greatest
