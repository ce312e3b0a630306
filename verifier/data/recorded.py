"""Recorded rollouts as JSON lines, one rollout a line with all its fields; a bad line is refused by its number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from verifier.data.rollout import Rollout, make_rollout
from verifier.errors import UsageError

_LONGEST_NAME = 255
"""Bytes of a file's name, at most, on Linux."""
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Routes = tuple[tuple[tuple[Whole, ...], ...], ...]


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rollout; lists have one entry for each token of the response."""

    id: str
    group: str
    """Prompt group; its rollouts share it."""
    prompt: tuple[Token, ...]
    """Token ids."""
    response: tuple[Token, ...]
    """Token ids, sampled ones and tool output."""
    sampled: tuple[bool, ...]
    """Drawn from the policy; the others are tool output."""
    mask: tuple[bool, ...]
    """In the loss; sampled tokens only."""
    logprobs: tuple[float, ...]
    """The engine's, nats; of tool output they mean nothing. In a file NaN is `null`."""
    versions: tuple[Whole, ...]
    """Weights that sampled each token; of tool output they mean nothing."""
    reward: float
    routes: Routes | None = None
    """[prompt + response, layers, experts per token] expert ids that the engine chose."""
    answer: str | None = None
    """Gold answer."""
    text: str | None = None
    """Text of the response, for readers and rewards; nothing is encoded from it."""
    rewarded_by: str = ""
    """Name of the reward function; empty where it is not known."""
    truncated: bool = False
    """The answer was cut off at the greatest length."""
    trajectory: str | None = None
    """Trajectory that this turn is a step of, with all earlier turns in its prompt; None for a whole rollout."""
    index: int = 0
    """Number of the step in its trajectory."""
    is_last_step: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt, *self.response]


def recorded_files(folder: Path) -> list[Path]:
    """Files of recorded rollouts in the order of their steps: by name, where numbers count as numbers, 2 before 10."""

    def padded(file: Path) -> tuple[str, str]:
        return re.sub("[0-9]+", lambda digits: digits[0].zfill(_LONGEST_NAME), file.name), file.name

    return sorted(folder.glob("*.jsonl"), key=padded)


def rollout_of(row: RolloutRow) -> Rollout:
    """Rollout of a row, routes included.

    Raises:
        UsageError: see `make_rollout`; routes of different numbers of layers or experts.
    """
    sizes = {(len(token), len(layer)) for token in row.routes or () for layer in token}
    if len(sizes) > 1:
        raise UsageError(f"rollout `{row.id}`: its tokens have routes of different sizes")
    return make_rollout(
        row.id, row.prompt, row.response, group=row.group, sampled=row.sampled, mask=row.mask, logprobs=row.logprobs,
        versions=row.versions, reward=row.reward, routes=None if row.routes is None else np.array(row.routes),
    )  # fmt: skip


def encoded(row: RolloutRow) -> Any:
    """JSON value of a row; inverse of `decoded`."""
    return msgspec.json.decode(msgspec.json.encode(row))


def decoded(fields: Any) -> RolloutRow:
    """Row of a JSON value.

    Raises:
        msgspec.ValidationError: it is no row.
    """
    if isinstance(fields, dict) and isinstance(nats := fields.get("logprobs"), list):
        fields = fields | {"logprobs": [math.nan if value is None else value for value in nats]}
    return msgspec.convert(fields, RolloutRow)


def read_recorded(
    path: Path, *, vocab_size: int | None = None, group_size: int | None = None
) -> tuple[RolloutRow, ...]:
    """Read rows and refuse what cannot be trained on.

    Args:
        path: file of JSON lines.
        vocab_size: tokens must lie below it; None checks none.
        group_size: rollouts of each group; step-wise, trajectories of each group. None checks none.

    Raises:
        UsageError: names the line: invalid JSON, an unknown key, a wrong type or length; a log-probability that is not
            finite, or a version below 0, on a sampled token; a repeated id; a token outside of the vocabulary; a group
            of another size; steps that are no whole trajectories (`check_steps`), or lie beside whole rollouts.
    """
    rows: list[RolloutRow] = []
    lines: list[str] = []
    first_line: dict[str, str] = {}
    for where, line in numbered_lines(path):
        with _named(where):
            row = _decoded(line)
            if row.id in first_line:
                raise UsageError(f"rollout `{row.id}` stands already in {first_line[row.id]}")
            if rows and (row.trajectory is None) != (rows[0].trajectory is None):
                raise UsageError(f"rollout `{row.id}`: either all rollouts of a file have a `trajectory` or none has")
            _check_tokens(row, vocab_size)
        rows.append(row)
        lines.append(where)
        first_line[row.id] = where
    if not rows:
        raise UsageError(f"{path} has no rollouts")
    if rows[0].trajectory is not None:
        _check_trajectories(rows, lines)
    if group_size is not None:
        _check_groups(rows, lines, group_size)
    return tuple(rows)


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _decoded(line: str) -> RolloutRow:
    try:
        return decoded(msgspec.json.decode(line))
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(str(error)) from error


def _check_tokens(row: RolloutRow, vocab_size: int | None) -> None:
    rollout_of(row)
    for at, token in enumerate(row.tokens):
        if vocab_size is not None and token >= vocab_size:
            where = f"outside of the vocabulary of {vocab_size:,}"
            raise UsageError(f"rollout `{row.id}`: token {at} has id {token}, {where}")
    if not math.isfinite(row.reward):
        raise UsageError(f"rollout `{row.id}`: its reward is {row.reward}")
    for at, drawn in enumerate(row.sampled):
        if drawn and not math.isfinite(row.logprobs[at]):
            raise UsageError(
                f"rollout `{row.id}`: response token {at} was sampled, but its log-probability is {row.logprobs[at]}"
            )
        if drawn and row.versions[at] < 0:
            raise UsageError(f"rollout `{row.id}`: response token {at} was sampled, but by version {row.versions[at]}")


def _check_trajectories(rows: Sequence[RolloutRow], lines: Sequence[str]) -> None:
    """`check_steps`, with the line of the trajectory that it refuses: of a torn one, the line where it goes on."""
    seen: set[str | None] = set()
    at = 0
    for trajectory, own in _trajectories(rows):
        with _named(lines[at]):
            check_steps(own if trajectory not in seen else rows)
            if len({row.group for row in own}) > 1:
                raise UsageError(f"trajectory `{trajectory}`: its steps belong to several groups")
        seen.add(trajectory)
        at += len(own)


def _check_groups(rows: Sequence[RolloutRow], lines: Sequence[str], group_size: int) -> None:
    """Refuse groups of another size, with the line of their first rollout; of a trajectory its last step counts."""
    members: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for row, where in zip(rows, lines, strict=True):
        first.setdefault(row.group, where)
        if row.trajectory is None or row.is_last_step:
            members.setdefault(row.group, []).append(row.id)
    for group, where in first.items():
        if len(ids := members[group]) != group_size:
            raise UsageError(
                f"{where}: group `{group}` (rollout `{ids[0]}`) has {len(ids)} rollouts, every group must have "
                f"{group_size}"
            )


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines of a file of text, each after its name in errors.

    Raises:
        UsageError: the file cannot be read, is not UTF-8 or has an empty line.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                if not line.strip():
                    raise UsageError(f"{where}: it is empty")
                yield where, line
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error


def check_steps(rows: Sequence[RolloutRow]) -> None:
    """Refuse rows, each a step, in training order, that do not form whole trajectories.

    Raises:
        UsageError: names the trajectory and the step: a trajectory is not contiguous, steps are missing or out of
            order, `is_last_step` is not exactly on the last one, or an input does not begin with the tokens of the
            step before it.

    Source:
        SkyRL, train/utils/trainer_utils.py `_validate_step_wise_fields` (contiguous ids, `is_last_step` on boundaries);
        cumulative inputs are checked here on top.
    """
    seen: set[str | None] = set()
    for trajectory, own in _trajectories(rows):
        if trajectory in seen:
            raise UsageError(
                f"trajectory `{trajectory}`, step {own[0].index}: another trajectory's steps lie between its own"
            )
        seen.add(trajectory)
    for trajectory, own in _trajectories(rows):
        for at, row in enumerate(own):
            where = f"trajectory `{trajectory}`, step {row.index}"
            if row.index != at:
                raise UsageError(f"{where}: step {at} is expected here")
            if row.is_last_step != (at == len(own) - 1):
                wrong = "is marked as the last one, but others follow" if row.is_last_step else "is not marked as last"
                raise UsageError(f"{where}: {wrong} (`is_last_step` belongs on step {len(own) - 1})")
            if at:
                _check_cumulative(own[at - 1].tokens, row.prompt, where)


def _trajectories(rows: Sequence[RolloutRow]) -> Iterator[tuple[str | None, list[RolloutRow]]]:
    return ((trajectory, list(own)) for trajectory, own in groupby(rows, key=lambda row: row.trajectory))


def _check_cumulative(before: Sequence[int], given: Sequence[int], where: str) -> None:
    if len(given) < len(before):
        raise UsageError(
            f"{where}: its input has {len(given)} tokens, fewer than the {len(before)} of the step before it"
        )
    for at, (token, known) in enumerate(zip(given, before, strict=False)):
        if token != known:
            raise UsageError(f"{where}: token {at} of its input is {token}, the step before it had {known}")
