"""One thing compared with another: same, or how different and where. Never a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifier.core.stage import Stage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A bound and where the bound comes from; a bare float is not a tolerance."""

    absolute: float = 0.0
    source: str

    def __str__(self) -> str:
        return f"{self.absolute:.3g} ({self.source})" if self.absolute else f"bitwise ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of one comparison between `actual` and `expected`."""

    what: str
    """Canonical tensor or sequence."""
    same: bool
    stage: Stage
    version: int = 0
    badness: float = 0.0
    """Orders mismatches of one check: 1 is "absent", otherwise a fraction or a multiple of the allowed bound."""
    sentence: str = ""
    """What is wrong, numbers included, understandable alone."""
    owner: str = ""
    expected: str = ""
    actual: str = ""
    mismatched: str = ""
    allowed: str = ""
    hint: str = ""


def describe_difference(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, str]:
    """Greatest absolute difference and the failure text's "mismatched" line for two arrays of one shape.

    NaN and infinity are counted apart and never folded into "greatest".

    Args:
        actual: any shape, any dtype.
        expected: same shape.

    Returns:
        (greatest absolute difference, infinity where only one side is finite; text).
    """
    import torch

    left, right = actual.double().flatten(), expected.double().flatten()
    finite = torch.isfinite(left) & torch.isfinite(right)
    both_nan = torch.isnan(left) & torch.isnan(right)
    bad = ~(left.eq(right) | both_nan)
    count, total = int(bad.sum()), left.numel()
    non_finite = int((~finite & ~both_nan & bad).sum())
    text = f"{count:,}/{total:,} ({100.0 * count / max(total, 1):.1f}%)"
    if not count:
        return 0.0, text
    gap = torch.where(finite, (left - right).abs(), torch.zeros_like(left))
    at = int(gap.argmax())
    relative = gap / right.abs().clamp_min(torch.finfo(torch.float64).tiny)
    relative_at = int(torch.where(finite & bad, relative, torch.zeros_like(relative)).argmax())
    text += f"; greatest abs {float(gap[at]):.3g} at {_index(at, actual.shape)}"
    text += f", greatest rel {float(relative[relative_at]):.3g} at {_index(relative_at, actual.shape)}"
    if non_finite:
        text += f"; {non_finite:,} not finite on one side"
    return (float("inf") if non_finite else float(gap[at])), text


def _index(flat: int, shape: tuple[int, ...]) -> str:
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return str(list(reversed(index)))
