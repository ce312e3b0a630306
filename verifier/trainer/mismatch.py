"""Mismatch of trainer and engine in numbers of a step: over all tokens, and by position in the answer."""

from __future__ import annotations

import numpy as np

NUM_POSITIONS = 8
"""Equal parts of the longest allowed answer."""


def mismatch_facts(differences: np.ndarray) -> dict[str, float]:
    """Greatest, 99th percentile and k3 of differences in nats, trainer minus engine; empty without tokens."""
    if not len(differences):
        return {}
    return {
        "mismatch_max": float(np.abs(differences).max()), "mismatch_p99": float(np.quantile(np.abs(differences), 0.99)),
        "mismatch_k3": float(np.mean(np.expm1(differences) - differences)),
    }  # fmt: skip


def by_position(differences: np.ndarray, positions: np.ndarray, longest: int) -> list[float | None]:
    """Mean magnitude of differences in each eighth of the longest answer; None for an eighth without tokens.

    Args:
        differences: nats, by token.
        positions: of each token among the sampled tokens of its rollout, from 0.
        longest: tokens that an answer may have; later tokens count to the last eighth.
    """
    part = np.minimum(positions * NUM_POSITIONS // longest, NUM_POSITIONS - 1)
    sizes = np.abs(differences)
    return [float(sizes[part == at].mean()) if (part == at).any() else None for at in range(NUM_POSITIONS)]
