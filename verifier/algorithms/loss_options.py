"""Options of the losses, checked without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verifier.algorithms.kl import check_kl_kind
from verifier.algorithms.registry import check_name
from verifier.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of `verifier.algorithms.losses.token_loss`.

    Raises:
        UsageError: a value outside of its range, or an unknown KL estimate.
    """

    clip_low: float = 0.2
    """Ratios below 1 - clip_low are clipped; 1 or more clips none."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high are clipped; above clip_low it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Greatest ratio that counts where the advantage is negative, above 1; for `clipped` only. None: no such bound."""
    kl_weight: float = 0.0
    """Weight of the KL divergence from the reference in the loss."""
    kl_kind: str = "k3"
    """Estimate of the KL divergence: k1, k2 or k3."""
    entropy_weight: float = 0.0
    """Weight of the entropy, which is subtracted from the loss."""

    def __post_init__(self) -> None:
        check_kl_kind(self.kl_kind)
        for name in ("clip_low", "clip_high", "kl_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be a number of at least 0")
        if not math.isfinite(self.entropy_weight):
            raise UsageError(f"entropy_weight is {self.entropy_weight}, it must be a number")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise UsageError(f"dual_clip is {self.dual_clip}, it must be above 1, or none")


def check_loss(name: str, options: LossOptions, *, has_reference: bool) -> None:
    """Refuse a loss whose options contradict one another.

    Raises:
        UsageError: an unknown name, a KL term without a reference, or `dual_clip` for a loss that does not read it.
    """
    check_name("loss", name)
    if options.kl_weight and not has_reference:
        raise UsageError(f"kl_weight is {options.kl_weight:g} and there is no reference: give one, or set kl_weight=0")
    if options.dual_clip is not None and name != "clipped":
        raise UsageError(f"dual_clip is {options.dual_clip:g} and the loss is `{name}`, which has none: use `clipped`")
