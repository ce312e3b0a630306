"""Token ledger: every token carries a sentinel through packing, sharding, log-probability and loss.

An off-by-one, a wrong chunk order or a swapped field keeps all shapes, but not the sentinels. A sentinel encodes the
rollout and the position of a label and travels as a label-aligned tensor (`pack(..., extra={"ledger": ...})`). At the
end every value that the loss consumed is compared with the rollout's value for that token.

Shape suffixes: L tokens of one rollout, T rows, N tokens of all rollouts.
"""
# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike

from verifier.data.rollout import NO_VERSION, Rollout
from verifier.train.pack import IGNORE_LABEL, PackedBatch

LEDGER = "ledger"
"""Name of the extra tensor that carries the sentinels; 0 where a row predicts nothing."""
_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossRows:
    """What the loss consumed, row by row, in any order, from all micro-batches and shards together."""

    sentinel_T: np.ndarray
    """int64, which token the row predicts, 0 for none."""
    input_T: np.ndarray
    """int64, token that entered the model at the row."""
    position_T: np.ndarray
    """int64, its position id."""
    role_T: np.ndarray
    """int8, its role."""
    label_T: np.ndarray
    """int64."""
    mask_T: np.ndarray
    """bool."""
    sampled_T: np.ndarray
    """bool."""
    engine_logprob_T: np.ndarray
    """float32, nats."""
    version_T: np.ndarray
    """int32."""
    reward_T: np.ndarray
    """float64, of the rollout that the row belongs to; NaN in padding."""
    group_T: np.ndarray
    """int64, a checksum of that rollout's group; 0 in padding."""
    id_T: np.ndarray
    """int64, a checksum of that rollout's id; 0 in padding."""
    prompt_T: np.ndarray
    """int64, that rollout's prompt length; 0 in padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplacement:
    """One token that did not arrive at the loss as the rollout has it."""

    rollout: str
    position: int
    """Of the predicted token within its rollout; -1 for a row that predicts none."""
    field: str
    """What differs; "row" when the token arrived not once."""
    expected: float
    actual: float


def sentinels(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """One [L] int64 array per rollout: its index plus one, and the token's position."""
    return [
        (np.int64(at + 1) << _POSITION_BITS) + np.arange(len(rollout), dtype=np.int64)
        for at, rollout in enumerate(rollouts)
    ]


def loss_rows(batches: Sequence[PackedBatch]) -> LossRows:
    """Rows as the loss gets them from these packs or shards, each of which carries the extra tensor `ledger`."""

    def joined(tensors: Sequence[torch.Tensor]) -> np.ndarray:
        return torch.cat(list(tensors)).numpy()

    def by_rollout(values: Sequence[Sequence[float]], fill: float, dtype: DTypeLike) -> np.ndarray:
        return np.concatenate(
            [
                np.array([*own, fill], dtype)[batch.segments_T.numpy()]  # padding's -1 takes the last entry
                for own, batch in zip(values, batches, strict=True)
            ]
        )

    return LossRows(
        sentinel_T=joined([batch.extra[LEDGER] if batch.ids else torch.zeros_like(batch.rows_T) for batch in batches]),
        input_T=joined([batch.tokens_T for batch in batches]),
        position_T=joined([batch.positions_T for batch in batches]),
        role_T=joined([batch.roles_T for batch in batches]),
        label_T=joined([batch.labels_T for batch in batches]),
        mask_T=joined([batch.loss_mask_T for batch in batches]),
        sampled_T=joined([batch.sampled_T for batch in batches]),
        engine_logprob_T=joined([batch.engine_logprobs_T for batch in batches]),
        version_T=joined([batch.versions_T for batch in batches]),
        reward_T=by_rollout([batch.rewards for batch in batches], np.nan, np.float64),
        group_T=by_rollout([[_checksum(group) for group in batch.groups] for batch in batches], 0, np.int64),
        id_T=by_rollout([[_checksum(name) for name in batch.ids] for batch in batches], 0, np.int64),
        prompt_T=by_rollout([batch.prompt_lengths for batch in batches], 0, np.int64),
    )


def audit(rollouts: Sequence[Rollout], rows: LossRows) -> list[Misplacement]:
    """Compare what the loss consumed with the rollouts: every token once, and every field its own.

    The first token of a rollout has no row that predicts it; all others must be there exactly once. A row that predicts
    nothing must be out of the loss.

    Args:
        rollouts: what should have gone in, in the order in which `sentinels` saw what did.
        rows: what arrived.

    Returns:
        All misplacements, by rollout and position; none when everything is in place.
    """
    lengths = np.array([len(rollout) for rollout in rollouts])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    real, known = _known(rows.sentinel_T, lengths)
    which = (rows.sentinel_T[known] >> _POSITION_BITS) - 1
    position = rows.sentinel_T[known] & _POSITION_MASK
    flat = starts[which] + position
    found = [
        Misplacement(rollout="", position=-1, field="row", expected=0, actual=float(sentinel))
        for sentinel in rows.sentinel_T[real & ~known]
    ]

    arrivals_N = np.bincount(flat, minlength=int(starts[-1]))
    expected_N = np.ones(int(starts[-1]), np.int64)
    expected_N[starts[:-1]] = 0
    for at in np.flatnonzero(arrivals_N != expected_N):
        owner = int(np.searchsorted(starts, at, side="right")) - 1
        found.append(
            Misplacement(
                rollout=rollouts[owner].id,
                position=int(at - starts[owner]),
                field="row",
                expected=float(expected_N[at]),
                actual=float(arrivals_N[at]),
            )
        )

    def compare(field: str, expected: np.ndarray, actual: np.ndarray) -> None:
        differs = expected != actual
        if differs.any():  # a NaN is in its place where a NaN was expected
            differs &= ~((expected != expected) & (actual != actual))
        found.extend(
            Misplacement(
                rollout=rollouts[int(which[at])].id,
                position=int(position[at]),
                field=field,
                expected=float(expected[at]),
                actual=float(actual[at]),
            )
            for at in np.flatnonzero(differs)
        )

    before = np.maximum(flat - 1, 0)
    for field, name, index, actual_T in (
        ("input", "tokens", before, rows.input_T),
        ("role", "roles", before, rows.role_T),
        ("label", "tokens", flat, rows.label_T),
        ("mask", "mask", flat, rows.mask_T),
        ("sampled", "sampled", flat, rows.sampled_T),
        ("engine_logprob", "logprobs", flat, rows.engine_logprob_T),
        ("version", "versions", flat, rows.version_T),
    ):
        compare(field, np.concatenate([getattr(rollout, name) for rollout in rollouts])[index], actual_T[known])
    compare("position", position - 1, rows.position_T[known])
    for field, values, actual_T in (
        ("reward", [rollout.reward for rollout in rollouts], rows.reward_T),
        ("group", [_checksum(rollout.group) for rollout in rollouts], rows.group_T),
        ("id", [_checksum(rollout.id) for rollout in rollouts], rows.id_T),
        ("prompt", [rollout.prompt_length for rollout in rollouts], rows.prompt_T),
    ):
        compare(field, np.array(values)[which], actual_T[known])
    found.extend(_stray_rows(rows, ~real))
    return sorted(found, key=lambda item: (item.rollout, item.position, item.field))


def _known(sentinel_T: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T] bool each: rows that predict a token, and those of them whose token is one of the rollouts'."""
    real = sentinel_T != 0
    which = (sentinel_T >> _POSITION_BITS) - 1
    inside = (which >= 0) & (which < len(lengths))
    inside[inside] = (sentinel_T & _POSITION_MASK)[inside] < lengths[which[inside]]
    return real, inside


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _stray_rows(rows: LossRows, idle: np.ndarray) -> list[Misplacement]:
    found: list[Misplacement] = []
    for field, values_T, expected in (
        ("label", rows.label_T, IGNORE_LABEL),
        ("mask", rows.mask_T, False),
        ("sampled", rows.sampled_T, False),
        ("version", rows.version_T, NO_VERSION),
    ):
        found.extend(
            Misplacement(rollout="", position=-1, field=field, expected=float(expected), actual=float(values_T[row]))
            for row in np.flatnonzero(idle & (values_T != expected))
        )
    return found
