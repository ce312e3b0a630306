"""Conversion between rollouts and left-padded rectangular batches, the form that many controllers exchange.

Shape suffixes: B rollouts, L columns (the longest prompt plus response), R columns of the response tensors.

Sequences end at the last column of [B, L]; responses end at the last column of [B, R]. So a response tensor is the last
R columns of its full-length twin, and a response of n tokens is its last n columns: `[-n:]`, never `[:n]`.
"""
# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.data.rollout import PROMPT_VALUES, Rollout
from verifier.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftPadded:
    """Rollouts as rows of rectangular arrays with padding on the left."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    rewards: tuple[float, ...]
    prompt_lengths: tuple[int, ...]
    tokens_BL: np.ndarray
    """int64."""
    attention_BL: np.ndarray
    """bool, True for real tokens."""
    positions_BL: np.ndarray
    """int64, counted from the first real token; 0 in padding."""
    response_BR: np.ndarray
    """bool, True for columns of the response; the others are prompt or padding."""
    sampled_BR: np.ndarray
    """bool."""
    mask_BR: np.ndarray
    """bool."""
    roles_BR: np.ndarray
    """int8, `Role`; PROMPT outside of the response."""
    logprobs_BR: np.ndarray
    """float32, nats; NaN where not sampled."""
    versions_BR: np.ndarray
    """int32; `NO_VERSION` where not sampled."""


def left_pad(rollouts: Sequence[Rollout], *, pad_token: int = 0) -> LeftPadded:
    """Put rollouts into rectangular arrays, padded on the left.

    L is the greatest prompt_i + response_i. The longest prompt plus the longest response would be nearly twice as long
    for anti-correlated lengths. Routes are not carried.
    """
    num_columns = max(len(rollout) for rollout in rollouts)
    num_response = max(rollout.response_length for rollout in rollouts)
    lengths_B1 = np.array([[len(rollout)] for rollout in rollouts])
    responses_B1 = np.array([[rollout.response_length] for rollout in rollouts])
    positions_BL = np.arange(num_columns) - (num_columns - lengths_B1)
    attention_BL = positions_BL >= 0
    response_BR = np.arange(num_response) >= num_response - responses_B1

    def filled(values: Sequence[np.ndarray], where: np.ndarray, fill: np.generic) -> np.ndarray:
        out = np.full(where.shape, fill)
        out[where] = np.concatenate(values)
        return out

    def responses(name: str, fill: np.generic) -> np.ndarray:
        return filled([getattr(rollout, name)[rollout.prompt_length :] for rollout in rollouts], response_BR, fill)

    return LeftPadded(
        ids=tuple(rollout.id for rollout in rollouts),
        groups=tuple(rollout.group for rollout in rollouts),
        rewards=tuple(rollout.reward for rollout in rollouts),
        prompt_lengths=tuple(rollout.prompt_length for rollout in rollouts),
        tokens_BL=filled([rollout.tokens for rollout in rollouts], attention_BL, np.int64(pad_token)),
        attention_BL=attention_BL,
        positions_BL=np.maximum(positions_BL, 0),
        response_BR=response_BR,
        **{f"{name}_BR": responses(name, fill) for name, fill in PROMPT_VALUES.items()},
    )


def remove_left_padding(batch: LeftPadded) -> list[Rollout]:
    """Return the rollouts that were padded, equal in every field but routes.

    Raises:
        ContractError: a row has padding behind or between its tokens, or its response is longer than the row.
    """
    rollouts, num_columns = [], batch.response_BR.shape[1]
    for at, rollout_id in enumerate(batch.ids):
        attention_L = batch.attention_BL[at]
        length, response = int(attention_L.sum()), int(batch.response_BR[at].sum())
        prompt = length - response
        if not attention_L[len(attention_L) - length :].all():
            raise ContractError(f"rollout `{rollout_id}`: padding must lie on the left, but follows a real token")
        if prompt != batch.prompt_lengths[at]:
            raise ContractError(
                f"rollout `{rollout_id}`: {length} tokens and a response of {response} leave a prompt of {prompt}, "
                f"but its prompt has {batch.prompt_lengths[at]}"
            )
        rollouts.append(
            Rollout(
                id=rollout_id,
                group=batch.groups[at],
                tokens=batch.tokens_BL[at, len(attention_L) - length :],
                prompt_length=prompt,
                reward=batch.rewards[at],
                **{
                    name: np.concatenate(
                        [np.full(prompt, fill), getattr(batch, f"{name}_BR")[at, num_columns - response :]]
                    )
                    for name, fill in PROMPT_VALUES.items()
                },
            )
        )
    return rollouts


def response_of(predicted_BL: np.ndarray, batch: LeftPadded) -> np.ndarray:
    """Cut the response out of a model's per-row output and shift it by one.

    Args:
        predicted_BL: [B, L] log-probabilities; column t belongs to token t + 1, the last column to no token.
        batch: the batch that went in.

    Returns:
        [B, R] log-probabilities; column t belongs to response column t. NaN outside of the response.
    """
    end = predicted_BL.shape[1] - 1
    return np.where(batch.response_BR, predicted_BL[:, end - batch.response_BR.shape[1] : end], np.nan)
