"""Mismatch of trainer and engine in numbers of a step: over all tokens, and by position in the answer."""

from __future__ import annotations

import numpy as np

from verifier.core.comparison import slope_of
from verifier.core.record import real
from verifier.core.records_tokens import SampledNoise

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


def sampled_noise(
    step: int, measured: int, rounded: np.ndarray, exact: np.ndarray, positions: np.ndarray, longest: int,
    *, routed: bool,
) -> SampledNoise:  # fmt: skip
    """Noise of a dtype on sampled tokens.

    Args:
        step: of the tokens.
        measured: version of the weights that sampled them.
        rounded: log-probabilities in that dtype, by token.
        exact: those in float32.
        positions: as `by_position` takes them.
        longest: likewise.
        routed: the model has routers.
    """
    differences = np.asarray(rounded, np.float64) - np.asarray(exact, np.float64)
    sizes, squares = np.abs(differences), differences**2
    unsure = -np.expm1(np.minimum(np.asarray(exact, np.float64), 0.0))
    slope, error = slope_of(differences, (np.asarray(rounded, np.float64) + exact) / 2)
    return SampledNoise(
        name="rollouts", version=step, measured=measured, tokens=len(sizes), greatest=real(float(sizes.max())),
        mean=real(float(sizes.mean())), deviation=real(float(sizes.std())), squares=real(float(squares.mean())),
        squares_deviation=real(float(squares.std())), p99=real(float(np.quantile(sizes, 0.99))),
        bias=real(float(differences.mean())), by_position=tuple(by_position(differences, positions, longest)),
        slope=real(slope), slope_error=real(error), routed=routed,
        greatest_of_run=real(float(sizes.max())), unsure=real(float(unsure.mean())),
        unsure_squares=real(float((unsure**2).mean())), most_unsure=real(float(unsure.max())),
    )  # fmt: skip
