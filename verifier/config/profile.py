"""Knobs of profiles of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.errors import UsageError
from verifier.knob import check, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Steps of which torch.profiler leaves a chrome trace.

    Raises:
        UsageError: an entry that is no whole number, or a step below 1.
    """

    steps: tuple[str, ...] = knob("Steps that torch.profiler looks at.", ())
    ranks: tuple[str, ...] = knob("Ranks that it looks at.", ("0",))

    def __post_init__(self) -> None:
        check(self)
        for name, least in (("steps", 1), ("ranks", 0)):
            for text in getattr(self, name):
                if not text.isascii() or not text.isdigit() or int(text) < least:
                    raise UsageError(f"profile.{name} has `{text}`, it must be a whole number of at least {least}")
        if self.steps and not self.ranks:
            raise UsageError("profile.steps is given and profile.ranks is empty: nothing would be profiled")

    def covers(self, step: int, rank: int) -> bool:
        """Tell whether a step is profiled on a rank."""
        return step in map(int, self.steps) and rank in map(int, self.ranks)
