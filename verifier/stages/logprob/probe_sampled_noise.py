"""Noise of a dtype on sampled tokens, in numbers of a step."""

from __future__ import annotations

import numpy as np

from verifier.core.comparison import slope_of
from verifier.core.record import real
from verifier.stages.logprob.records import SampledNoise


def sampled_noise(step: int, measured: int, rounded: np.ndarray, exact: np.ndarray, *, routed: bool) -> SampledNoise:
    """Noise of a dtype on sampled tokens.

    Args:
        step: of the tokens.
        measured: version of the weights that sampled them.
        rounded: log-probabilities in that dtype, by token.
        exact: those in float32.
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
        bias=real(float(differences.mean())), slope=real(slope), slope_error=real(error), routed=routed,
        greatest_of_run=real(float(sizes.max())), unsure=real(float(unsure.mean())),
        unsure_squares=real(float((unsure**2).mean())), most_unsure=real(float(unsure.max())),
    )  # fmt: skip
