"""Token ledger: every token carries a sentinel through packing, sharding, log-probability and loss.

An off-by-one, a wrong chunk order or a swapped field keeps all shapes, but not the sentinels. A sentinel encodes the
rollout and the position of a label and travels as a label-aligned tensor (`pack(..., extra={"ledger": ...})`). Every
value that the loss consumed is recorded with it; PCK001 compares them with what the run says of that token.

Shape suffixes: L tokens of one rollout, T rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike

from verifier.data.rollout import Rollout
from verifier.train.pack import PackedBatch

LEDGER = "ledger"
"""Name of the extra tensor that carries the sentinels; 0 where a row predicts nothing."""
_POSITION_BITS = 32


def sentinels(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """One [L] int64 array per rollout: its index plus one, and the token's position."""
    return [
        (np.int64(at + 1) << _POSITION_BITS) + np.arange(len(rollout), dtype=np.int64)
        for at, rollout in enumerate(rollouts)
    ]


def loss_rows(batches: Sequence[PackedBatch]) -> dict[str, np.ndarray]:
    """Rows as the loss gets them from these packs or shards, each of which carries the extra tensor `ledger`.

    Returns:
        The arrays of `verifier.core.records_tokens.TokenLedger`, with nothing shared with the batches.
    """

    def cat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
        return torch.cat(list(tensors)).numpy()

    def by_rollout(values: Sequence[Sequence[float]], fill: float, dtype: DTypeLike) -> np.ndarray:
        return np.concatenate(
            [
                np.array([*own, fill], dtype)[batch.segments_T.numpy()]  # padding's -1 takes the last entry
                for own, batch in zip(values, batches, strict=True)
            ]
        )

    return {
        "sentinel": cat([batch.extra[LEDGER] if batch.ids else torch.zeros_like(batch.rows_T) for batch in batches]),
        "input": cat([batch.tokens_T for batch in batches]),
        "position": cat([batch.positions_T for batch in batches]),
        "role": cat([batch.roles_T for batch in batches]),
        "label": cat([batch.labels_T for batch in batches]),
        "mask": cat([batch.loss_mask_T for batch in batches]),
        "sampled": cat([batch.sampled_T for batch in batches]),
        "engine_logprob": cat([batch.engine_logprobs_T for batch in batches]),
        "version": cat([batch.versions_T for batch in batches]),
        "reward": by_rollout([batch.rewards for batch in batches], np.nan, np.float64),
        "group": by_rollout([[_checksum(group) for group in batch.groups] for batch in batches], 0, np.int64),
        "id": by_rollout([[_checksum(name) for name in batch.ids] for batch in batches], 0, np.int64),
        "prompt": by_rollout([batch.prompt_lengths for batch in batches], 0, np.int64),
    }


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())
