"""The trainer's log-probabilities in updates of a sampled step: the loss that it reports is that of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused
from verifier.megatron.pack import POSITION_BITS


def tells_scores(config: TrainConfig) -> bool:
    """True if rounding makes the loss another than the oracle's, and may put a token beyond a clip's edge."""
    return config.dtype != "float32"


def save_scores(folder: Path, number: int, coordinate: str, rows: Mapping[str, np.ndarray]) -> None:
    """Write a rank's log-probabilities of one update; `rows` are arrays of `LossRows`."""
    file = _folder(folder, number) / f"{coordinate.replace(' ', '-')}.npz"
    with full_disk_refused(file):
        file.parent.mkdir(exist_ok=True)
        np.savez(file, sentinel=rows["sentinel"], mask=rows["mask"], current=rows["current"])


def load_scores(folder: Path, number: int, lengths: Sequence[int]) -> np.ndarray | None:
    """Log-probabilities that ranks wrote of one update.

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
