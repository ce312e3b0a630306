"""Step-wise trajectories: the turns of an agent, each a training sample whose input holds all earlier turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from verifier.data.rollout import Role, Rollout
from verifier.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One turn: the whole input given to the engine and the response that it sampled."""

    trajectory: str
    index: int
    """Number of the turn within its trajectory, from 0."""
    is_last_step: bool
    rollout: Rollout
    """Rollout whose prompt is everything before this turn and whose response is this turn alone."""


def check_steps(steps: Sequence[Step]) -> None:
    """Refuse steps, in training order, that do not form whole trajectories.

    Raises:
        UsageError: names the trajectory and the step: a trajectory is not contiguous, steps are missing or out of
            order, `is_last_step` is not exactly on the last one, an input does not begin with the tokens of the step
            before it, or the loss mask covers a token that was not sampled in that very step.

    Source:
        SkyRL, train/utils/trainer_utils.py `_validate_step_wise_fields` (contiguous ids, `is_last_step` on boundaries);
        cumulative inputs and the mask are checked here on top.
    """
    seen: set[str] = set()
    for trajectory, own in _trajectories(steps):
        if trajectory in seen:
            raise UsageError(
                f"trajectory `{trajectory}`, step {own[0].index}: another trajectory's steps lie between its own"
            )
        seen.add(trajectory)
    for trajectory, own in _trajectories(steps):
        for at, step in enumerate(own):
            where = f"trajectory `{trajectory}`, step {step.index}"
            if step.index != at:
                raise UsageError(f"{where}: step {at} is expected here")
            if step.is_last_step != (at == len(own) - 1):
                wrong = "is marked as the last one, but others follow" if step.is_last_step else "is not marked as last"
                raise UsageError(f"{where}: {wrong} (`is_last_step` belongs on step {len(own) - 1})")
            if at:
                _check_cumulative(own[at - 1].rollout, step.rollout, where)
            outside = step.rollout.mask & (step.rollout.roles != Role.ASSISTANT)
            if outside.any():
                raise UsageError(f"{where}: token {int(outside.argmax())} is in the loss mask, but nobody sampled it")


def _trajectories(steps: Sequence[Step]) -> Iterator[tuple[str, list[Step]]]:
    return ((trajectory, list(own)) for trajectory, own in groupby(steps, key=lambda step: step.trajectory))


def _check_cumulative(before: Rollout, after: Rollout, where: str) -> None:
    given = after.tokens[: after.prompt_length]
    if len(given) < len(before):
        raise UsageError(
            f"{where}: its input has {len(given)} tokens, fewer than the {len(before)} of the step before it"
        )
    differs = given[: len(before)] != before.tokens
    if differs.any():
        at = int(differs.argmax())
        raise UsageError(
            f"{where}: token {at} of its input is {int(given[at])}, the step before it had {int(before.tokens[at])}"
        )
