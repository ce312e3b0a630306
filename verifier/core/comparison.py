"""One thing compared with another: same, or how different and where. Never a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifier.core.stage import Stage

if TYPE_CHECKING:
    import numpy as np


SUSPECTED = 4.0
"""Multiple of a computed bound below which a mismatch is suspected, and judged again on fresh evidence (ADR 0083)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A bound and where the bound comes from; a bare float is not a tolerance."""

    absolute: float = 0.0
    unit: str = ""
    """Unit of `absolute` in the failure text: "nats", "learning rates"."""
    source: str

    def __str__(self) -> str:
        bound = f"{self.absolute:.3g} {self.unit}".rstrip() if self.absolute else "bitwise"
        return f"{bound} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of one comparison between `actual` and `expected`."""

    what: str
    """Canonical tensor or sequence."""
    same: bool
    stage: Stage
    version: int = 0
    badness: float = 0.0
    """Orders exact mismatches of one check: 1 is "absent", otherwise a fraction. Like the texts below it is read of
    mismatches only."""
    share: float | None = None
    """Value over what is allowed, of a bound that is computed, whether it holds or not; None of a bitwise or exact
    comparison. Infinite for a value that is not finite."""
    sentence: str = ""
    """Sentence that says what is wrong, numbers included, understandable alone."""
    owner: str = ""
    expected: str = ""
    actual: str = ""
    mismatched: str = ""
    allowed: str = ""
    hint: str = ""
    absent: bool = False
    """One side was not recorded: a mismatch, unless the run broke within this version and may not have got there."""
    left_out: tuple[str, ...] = ()
    """Names that the check had nothing to compare with; the same in every comparison of a check that has any."""
    widened: str = ""
    """Dtypes of two sides with the same values, "bfloat16 as float32"; empty where the bits are the same."""

    @property
    def severity(self) -> float:
        """Orders mismatches of one check: the share of a computed bound, else the badness."""
        return self.badness if self.share is None else self.share

    @property
    def suspected(self) -> bool:
        """A computed bound is exceeded, by less than `SUSPECTED` times."""
        return not self.same and self.share is not None and 1 < self.share < SUSPECTED

    @property
    def place(self) -> tuple[int, int, Stage]:
        """Position in the data flow: the least of several mismatches came first.

        By version, then by stage, with two exceptions. From version 1 on a version begins with the update that made it,
        so its loss and its step come before the trainer scores with the weights that they left. Version 0 ends with the
        idle step, after its export.
        """
        step = self.stage in (Stage.LOSS, Stage.TRAIN)
        if step and self.version == 0:
            return 0, 2, self.stage
        return self.version, int(self.stage >= Stage.LOGPROB and not step), self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Differences of two arrays of one shape, element by element."""

    greatest: float
    """Greatest absolute difference over the elements that are finite on both sides."""
    num_not_finite: int
    """Elements that are NaN or infinite on either side; they are wrong whatever the other side holds."""
    text: str
    """The failure text's "mismatched" line."""


def describe_difference(actual: np.ndarray, expected: np.ndarray) -> Difference:
    """Compare two arrays; NaN and infinity are counted apart and never folded into "greatest".

    Args:
        actual: any shape, any dtype.
        expected: same shape.
    """
    import numpy as np

    def index(flat: np.intp) -> list[int]:
        return [int(place) for place in np.unravel_index(flat, actual.shape)]

    left, right = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    finite = np.isfinite(left) & np.isfinite(right)
    bad = finite & (left != right)
    num_not_finite, total = int((~finite).sum()), left.size
    count = int(bad.sum()) + num_not_finite
    text = f"{count:,}/{total:,} ({100.0 * count / max(total, 1):.1f}%)"
    greatest = 0.0
    if bad.any():
        gap = np.where(bad, np.abs(np.where(bad, left, 0) - np.where(bad, right, 0)), 0)
        relative = gap / np.maximum(np.abs(np.where(bad, right, 1)), np.finfo(np.float64).tiny)
        greatest = float(gap.max())
        text += f"; greatest abs {greatest:.3g} at {index(gap.argmax())}"
        text += f", greatest rel {float(relative.max()):.3g} at {index(relative.argmax())}"
    if num_not_finite:
        text += f"; {num_not_finite:,} not finite, the first at {index((~finite).argmax())}"
    return Difference(greatest=greatest, num_not_finite=num_not_finite, text=text)


def slope_of(differences: np.ndarray, values: np.ndarray, together: np.ndarray | None = None) -> tuple[float, float]:
    """Slope of differences over values by least squares, and its standard error, whatever each one's spread is.

    The error is White's (1980); Liang and Zeger's (1986) where those with one number of `together` go together. Values
    that are all equal have a slope of 0.
    """
    import numpy as np

    centred = values - values.mean()
    total = float((centred**2).sum())
    if total == 0.0:
        return 0.0, 0.0
    slope = float((centred * differences).sum()) / total
    rest = differences - differences.mean() - slope * centred
    parts = centred * rest if together is None else np.bincount(together, centred * rest)
    return slope, math.sqrt(float((parts**2).sum())) / total
