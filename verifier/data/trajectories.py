"""Step-wise trajectories: the turns of an agent, each a training sample whose input holds all earlier turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from verifier.data.rollout import MISSING_ROUTE, PROMPT_VALUES, Role, Rollout
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


def join_steps(steps: Sequence[Step]) -> list[Rollout]:
    """Join the steps of each trajectory into one multi-turn rollout; tokens between turns become tool output.

    The reward is the sum over the steps. The group is that of the first step.

    Raises:
        UsageError: see `check_steps`.
    """
    check_steps(steps)
    return [_joined(trajectory, [step.rollout for step in own]) for trajectory, own in _trajectories(steps)]


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


def _joined(trajectory: str, turns: list[Rollout]) -> Rollout:
    last = turns[-1]
    arrays = {name: np.full(len(last), value) for name, value in PROMPT_VALUES.items()}
    arrays["roles"][turns[0].prompt_length :] = Role.TOOL
    for turn in turns:
        for name, array in arrays.items():
            array[turn.prompt_length : len(turn)] = getattr(turn, name)[turn.prompt_length :]
    return Rollout(
        id=trajectory,
        group=turns[0].group,
        tokens=last.tokens,
        prompt_length=turns[0].prompt_length,
        reward=sum(turn.reward for turn in turns),
        routes=_joined_routes(turns),
        **arrays,
    )


def _joined_routes(turns: list[Rollout]) -> np.ndarray | None:
    """[L, M, K] routes, each token's from the first turn that reported them, when its key and value were computed."""
    last = turns[-1]
    if last.routes is None:
        return None
    routes = last.routes.copy()
    for turn in reversed(turns[:-1]):
        if turn.routes is not None:
            reported = (turn.routes != MISSING_ROUTE).all(axis=(1, 2))
            routes[: len(turn)][reported] = turn.routes[reported]
    return routes
