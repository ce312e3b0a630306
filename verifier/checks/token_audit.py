"""The audit of the token ledger: what the loss consumed, row by row, against what the run says of every token."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verifier.core.records_tokens import Rollouts

POSITION_BITS = 32
"""Low bits of a sentinel, which hold the position; those above hold the rollout's index plus one."""
NO_LABEL = -100
"""Label of a row that predicts nothing."""
NO_VERSION = -1
"""Weight version of a token that no weights sampled."""
Rows = Mapping[str, np.ndarray]
"""Arrays of `TokenLedger`, and ``rank`` [T] int64, the trainer rank that had the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplacement:
    """One token that did not arrive at the loss as the run has it."""

    rollout: str
    """Id; empty for a row that predicts no token of any rollout."""
    position: int
    """Position of the predicted token in its rollout; -1 for a row that predicts none."""
    field: str
    """Field that differs; "row" when the token did not arrive exactly once."""
    expected: float
    actual: float
    rank: int | None = None
    """Trainer rank that had the row; None where none had."""


def joined(parts: Sequence[Mapping[str, np.ndarray]], ranks: Sequence[int]) -> dict[str, np.ndarray]:
    """Rows of all ranks, with the rank of each."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counts = [len(part["sentinel"]) for part in parts]
    return {**rows, "rank": np.repeat(np.array(ranks, np.int64), counts)}


def audit(rollouts: Rollouts, tokens: Mapping[str, np.ndarray], rows: Rows) -> list[Misplacement]:
    """Compare what the loss consumed with the rollouts: every token once, and every field its own.

    The first token of a rollout has no row that predicts it; all others must be there exactly once. A row that predicts
    nothing must be out of the loss.

    Args:
        rollouts: what should have gone in, in the order in which sentinels were given.
        tokens: its arrays.
        rows: what arrived.

    Returns:
        All misplacements, by rollout and position; none when everything is in place.
    """
    lengths = np.array(rollouts.lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sentinel = rows["sentinel"]
    real = sentinel != 0
    which = (sentinel >> POSITION_BITS) - 1
    position = sentinel & ((1 << POSITION_BITS) - 1)
    known = (which >= 0) & (which < len(lengths))
    known[known] = position[known] < lengths[which[known]]
    found = [
        Misplacement(
            rollout="", position=-1, field="row", expected=0, actual=float(sentinel[at]), rank=int(rows["rank"][at])
        )
        for at in np.flatnonzero(real & ~known)
    ]
    which, position, ranks = which[known], position[known], rows["rank"][known]
    flat = starts[which] + position
    found += _not_once(rollouts, starts, flat, ranks)

    before = np.maximum(flat - 1, 0)
    expected = {
        "input": tokens["tokens"][before],
        "role": tokens["roles"][before],
        "label": tokens["tokens"][flat],
        "mask": tokens["mask"][flat],
        "sampled": tokens["sampled"][flat],
        "engine_logprob": tokens["logprobs"][flat],
        "version": tokens["versions"][flat],
        "position": position - 1,
        "reward": np.array(rollouts.rewards, np.float64)[which],
        "group": np.array([checksum(group) for group in rollouts.groups], np.int64)[which],
        "id": np.array([checksum(name) for name in rollouts.ids], np.int64)[which],
        "prompt": np.array(rollouts.prompt_lengths, np.int64)[which],
    }
    for field, want in expected.items():
        got = rows[field][known]
        for at in np.flatnonzero(_differs(got, want)):
            found.append(
                Misplacement(
                    rollout=rollouts.ids[int(which[at])], position=int(position[at]), field=field,
                    expected=float(want[at]), actual=float(got[at]), rank=int(ranks[at]),
                )
            )  # fmt: skip
    found += _stray_rows(rows, ~real)
    return sorted(found, key=lambda item: (item.rollout, item.position, item.field))


def checksum(text: str) -> int:
    """CRC-32 of an id or a group."""
    return zlib.crc32(text.encode())


def _differs(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """[N] bool; a NaN is in its place where a NaN was expected."""
    differs: np.ndarray = got != want
    if differs.any():
        differs &= ~((got != got) & (want != want))
    return differs


def _not_once(rollouts: Rollouts, starts: np.ndarray, flat: np.ndarray, ranks: np.ndarray) -> Iterator[Misplacement]:
    """Tokens that arrived never, or several times."""
    arrived = np.bincount(flat, minlength=int(starts[-1]))
    expected = np.ones(int(starts[-1]), np.int64)
    expected[starts[:-1]] = 0
    for at in np.flatnonzero(arrived != expected):
        owner = int(np.searchsorted(starts, at, side="right")) - 1
        holders = ranks[flat == at]
        yield Misplacement(
            rollout=rollouts.ids[owner], position=int(at - starts[owner]), field="row", expected=float(expected[at]),
            actual=float(arrived[at]), rank=int(holders[-1]) if len(holders) else None,
        )  # fmt: skip


def _stray_rows(rows: Rows, idle: np.ndarray) -> Iterator[Misplacement]:
    """Rows that predict nothing and yet take part."""
    for field, expected in (("label", NO_LABEL), ("mask", False), ("sampled", False), ("version", NO_VERSION)):
        for row in np.flatnonzero(idle & (rows[field] != expected)):
            yield Misplacement(
                rollout="", position=-1, field=field, expected=float(expected), actual=float(rows[field][row]),
                rank=int(rows["rank"][row]),
            )  # fmt: skip
