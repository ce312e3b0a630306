"""The trainer's log-probabilities in updates of a sampled step: the loss that it reports is that of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verifier.config.training import TrainConfig
from verifier.core.comparison import slope_of
from verifier.core.outputs import full_disk_refused
from verifier.core.record import real
from verifier.stages.logprob.records import SampledNoise
from verifier.train.pack import POSITION_BITS
from verifier.trainer.metrics import by_position


def tells_scores(config: TrainConfig) -> bool:
    """True if rounding makes the loss another than the oracle's, and may put a token beyond a clip's edge."""
    return config.dtype != "float32"


def save_scores(folder: Path, number: int, coordinate: str, rows: Mapping[str, np.ndarray]) -> None:
    """Write a rank's log-probabilities of one update.

    Args:
        folder: of the sampled step.
        number: of the update.
        coordinate: of the rank.
        rows: arrays of `stages.loss.records.LossRows`.
    """
    file = _folder(folder, number) / f"{coordinate.replace(' ', '-')}.npz"
    with full_disk_refused(file):
        file.parent.mkdir(exist_ok=True)
        np.savez(file, sentinel=rows["sentinel"], mask=rows["mask"], current=rows["current"])


def load_scores(folder: Path, number: int, lengths: Sequence[int]) -> np.ndarray | None:
    """Log-probabilities that ranks wrote of one update.

    Args:
        folder: of the sampled step.
        number: of the update.
        lengths: of the update's rollouts, tokens.

    Returns:
        [T] float32 over all tokens of the rollouts, nats, NaN where no rank wrote one; None if no rank wrote any.
    """
    files = sorted(_folder(folder, number).glob("*.npz"))
    found, starts = np.full(sum(lengths), np.nan, np.float32), np.cumsum([0, *lengths])
    for file in files:
        rows = np.load(file)
        kept = rows["mask"].astype(bool)
        sentinel = rows["sentinel"][kept].astype(np.int64)
        place = starts[(sentinel >> POSITION_BITS) - 1] + (sentinel & ((1 << POSITION_BITS) - 1))
        found[place] = rows["current"][kept]
    return found if files else None


def _folder(folder: Path, number: int) -> Path:
    return folder / f"scores-{number}"


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
