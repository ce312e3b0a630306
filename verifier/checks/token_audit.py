"""The audit of the token ledger: what the loss consumed, row by row, against what the run says of every token."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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


class Misplacement(NamedTuple):
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
    found = list(_strays(rows, real & ~known, "row", "sentinel", 0))
    for field, value in (("label", NO_LABEL), ("mask", False), ("sampled", False), ("version", NO_VERSION)):
        found += _strays(rows, ~real & (rows[field] != value), field, field, value)
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
        "group": _checksums(rollouts.groups)[which],
        "id": _checksums(rollouts.ids)[which],
        "prompt": np.array(rollouts.prompt_lengths, np.int64)[which],
    }
    for field, want in expected.items():
        got = rows[field][known]
        for at in np.flatnonzero((got != want) & ((got == got) | (want == want))):  # a NaN is right for a NaN
            name = rollouts.ids[which[at]]
            found.append(Misplacement(name, int(position[at]), field, float(want[at]), float(got[at]), int(ranks[at])))
    return sorted(found, key=lambda item: item[:3])


def _checksums(texts: Sequence[str]) -> np.ndarray:
    """CRC-32 of each id or group."""
    return np.array([zlib.crc32(text.encode()) for text in texts], np.int64)


def _strays(rows: Rows, wrong: np.ndarray, field: str, column: str, expected: float) -> Iterator[Misplacement]:
    """Rows that predict no token of any rollout and yet take part, by the field that says so."""
    for at in np.flatnonzero(wrong):
        yield Misplacement("", -1, field, float(expected), float(rows[column][at]), int(rows["rank"][at]))


def _not_once(rollouts: Rollouts, starts: np.ndarray, flat: np.ndarray, ranks: np.ndarray) -> Iterator[Misplacement]:
    """Tokens that arrived never, or several times."""
    arrived = np.bincount(flat, minlength=int(starts[-1]))
    expected = np.ones(int(starts[-1]), np.int64)
    expected[starts[:-1]] = 0
    for at in np.flatnonzero(arrived != expected):
        owner = int(np.searchsorted(starts, at, side="right")) - 1
        holders = ranks[flat == at]
        rank = int(holders[-1]) if len(holders) else None
        position = int(at - starts[owner])
        yield Misplacement(rollouts.ids[owner], position, "row", float(expected[at]), float(arrived[at]), rank)
