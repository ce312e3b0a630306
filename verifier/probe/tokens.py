"""Tokens of a step as a trainer holds them, brought to the columns of the evidence: all tokens, rollout after rollout.

A trainer keeps values of a response's tokens, of all tokens, or of all tokens but the first, as a shifted log-softmax
gives them. Each is told by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verifier.errors import UsageError

Rows = Sequence[Any]
"""One sequence of numbers a rollout: list, numpy array or tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Rollouts of one step; arrays [N] over all tokens of all rollouts."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]
    tokens: np.ndarray
    mask: np.ndarray
    engine: np.ndarray
    versions: np.ndarray
    temperature: float

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rollout, its prompt included."""
        return tuple(len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True))

    def column(self, rows: Rows, what: str, *, fill: float = np.nan, dtype: Any = np.float32) -> np.ndarray:
        """Values of every token [N]; those that a row does not have are `fill`.

        Raises:
            UsageError: another number of rows than rollouts, or a row of a length that is none of the three.
        """
        return _column(self.prompts, self.responses, rows, what, fill=fill, dtype=dtype)


def step_tokens(
    prompts: Rows, responses: Rows, loss_mask: Rows, engine_logprobs: Rows | None, versions: int | Rows,
    rewards: Sequence[float] | None, groups: Sequence[Any] | None, ids: Sequence[Any] | None, temperature: float,
    step: int,
) -> StepTokens:  # fmt: skip
    """Tokens of a step; see `LoopRecorder.rollouts`.

    Raises:
        UsageError: lists of different lengths, or an empty prompt.
    """
    asked = tuple(tuple(row_of(row, np.int64).tolist()) for row in prompts)
    given = tuple(tuple(row_of(row, np.int64).tolist()) for row in responses)
    counts = {"prompts": len(asked), "responses": len(given)}
    counts |= {
        name: len(value)
        for name, value in (("rewards", rewards), ("groups", groups), ("ids", ids))
        if value is not None
    }
    if len(set(counts.values())) > 1:
        raise UsageError(f"step {step} has {', '.join(f'{size} {name}' for name, size in counts.items())}")
    if not all(asked):
        raise UsageError(f"step {step} has a rollout with an empty prompt, whose first token no model scores")
    drawn = [np.full(len(row), versions, np.int32) for row in given] if isinstance(versions, int) else versions
    scored = engine_logprobs if engine_logprobs is not None else [np.full(len(row), np.nan) for row in given]
    return StepTokens(
        ids=tuple(map(str, ids)) if ids is not None else tuple(f"{step}/{at}" for at in range(len(asked))),
        groups=tuple(map(str, groups if groups is not None else [f"{step}/{asked.index(prompt)}" for prompt in asked])),
        prompts=asked, responses=given,
        rewards=tuple(map(float, rewards)) if rewards is not None else (0.0,) * len(asked),
        tokens=np.array([token for both in zip(asked, given, strict=True) for row in both for token in row], np.int64),
        mask=_column(asked, given, loss_mask, "loss_mask", fill=0, dtype=bool),
        engine=_column(asked, given, scored, "engine_logprobs"),
        versions=_column(asked, given, drawn, "versions", fill=-1, dtype=np.int32), temperature=temperature,
    )  # fmt: skip


def _column(
    prompts: Rows, responses: Rows, rows: Rows, what: str, *, fill: float = np.nan, dtype: Any = np.float32
) -> np.ndarray:
    if len(rows) != len(prompts):
        raise UsageError(f"`{what}` has {len(rows)} rows for {len(prompts)} rollouts")
    parts = []
    for at, (prompt, response, row) in enumerate(zip(prompts, responses, rows, strict=True)):
        values, whole = row_of(row, dtype), len(prompt) + len(response)
        if values.size not in (len(response), whole - 1, whole):
            raise UsageError(
                f"`{what}` has {values.size} values for rollout {at}, which has {len(response)} tokens in its response "
                f"and {whole} with its prompt"
            )
        parts.append(np.concatenate([np.full(whole - values.size, fill, dtype), values]))
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def row_of(row: Any, dtype: Any) -> np.ndarray:
    """A row of numbers as an array on the host, a copy."""
    if hasattr(row, "detach"):
        row = row.detach().cpu()
        row = row.double().numpy() if row.is_floating_point() else row.numpy()  # numpy has no bfloat16
    return np.array([] if row is None else row).astype(dtype).reshape(-1)
