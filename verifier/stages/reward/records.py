"""Records of the stage `reward`: answers to rewards."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, per_answers
from verifier.core.record import Record


class GivenRewards(Record, frozen=True, kw_only=True, tag="reward/rewards"):
    """Rewards of a batch and what they were given for; lists have an entry a rollout."""

    owed = (Owed(anyone, per_answers),)

    reward: str
    """Name of the reward function; empty for rewards that were recorded."""
    ids: tuple[str, ...]
    texts: tuple[str | None, ...]
    """Text of each answer; None where it is not known."""
    answers: tuple[str | None, ...]
    """Gold answer of each prompt; None where it is not known."""
    rewards: tuple[float, ...]
