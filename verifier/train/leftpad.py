"""Left-padded batches, as engines and controllers pass them around, and back to rollouts without padding.

Shape suffixes: B rollouts, L columns (the longest prompt plus response), R columns of the response tensors.

Sequences end at the last column of [B, L]; responses end at the last column of [B, R]. So a response tensor is the last
R columns of its full-length twin, and a response of n tokens is its last n columns: `[-n:]`, never `[:n]`.
"""
# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.data.rollout import NO_VERSION, Role, Rollout
from verifier.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftPadded:
    """Rollouts as rows of rectangular arrays, padding on the left."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    rewards: tuple[float, ...]
    prompt_lengths: tuple[int, ...]
    tokens_BL: np.ndarray
    """int64."""
    attention_BL: np.ndarray
    """bool, real tokens."""
    positions_BL: np.ndarray
    """int64, counted from the first real token; 0 in padding."""
    response_BR: np.ndarray
    """bool, which columns are the rollout's response; the others are prompt or padding."""
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

    L is the greatest prompt_i + response_i, not the longest prompt plus the longest response: with anti-correlated
    lengths the latter is nearly twice as long. Routes are not carried.
    """
    num_columns = max(len(rollout) for rollout in rollouts)
    num_response = max(rollout.response_length for rollout in rollouts)
    lengths_B1 = np.array([[len(rollout)] for rollout in rollouts])
    responses_B1 = np.array([[rollout.response_length] for rollout in rollouts])
    positions_BL = np.arange(num_columns) - (num_columns - lengths_B1)
    attention_BL = positions_BL >= 0
    response_BR = np.arange(num_response) >= num_response - responses_B1

    def filled(values: Sequence[np.ndarray], where: np.ndarray, fill: float, dtype: type) -> np.ndarray:
        out: np.ndarray = np.full(where.shape, fill, dtype)
        out[where] = np.concatenate(values)
        return out

    def responses(name: str, fill: float, dtype: type) -> np.ndarray:
        parts = [getattr(rollout, name)[rollout.prompt_length :] for rollout in rollouts]
        return filled(parts, response_BR, fill, dtype)

    return LeftPadded(
        ids=tuple(rollout.id for rollout in rollouts),
        groups=tuple(rollout.group for rollout in rollouts),
        rewards=tuple(rollout.reward for rollout in rollouts),
        prompt_lengths=tuple(rollout.prompt_length for rollout in rollouts),
        tokens_BL=filled([rollout.tokens for rollout in rollouts], attention_BL, pad_token, np.int64),
        attention_BL=attention_BL,
        positions_BL=np.maximum(positions_BL, 0),
        response_BR=response_BR,
        sampled_BR=responses("sampled", False, np.bool_),
        mask_BR=responses("mask", False, np.bool_),
        roles_BR=responses("roles", Role.PROMPT, np.int8),
        logprobs_BR=responses("logprobs", np.nan, np.float32),
        versions_BR=responses("versions", NO_VERSION, np.int32),
    )


def remove_left_padding(batch: LeftPadded) -> list[Rollout]:
    """The rollouts that were padded, equal in every field but routes.

    Raises:
        ContractError: a row has padding behind or between its tokens, or its response is longer than the row.
    """
    rollouts = []
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
                sampled=_whole(batch.sampled_BR[at], prompt, response, False),
                mask=_whole(batch.mask_BR[at], prompt, response, False),
                roles=_whole(batch.roles_BR[at], prompt, response, Role.PROMPT),
                logprobs=_whole(batch.logprobs_BR[at], prompt, response, np.nan),
                versions=_whole(batch.versions_BR[at], prompt, response, NO_VERSION),
                reward=batch.rewards[at],
            )
        )
    return rollouts


def response_of(predicted_BL: np.ndarray, batch: LeftPadded) -> np.ndarray:
    """The part of a model's per-row output that belongs to the response, shifted by one.

    Args:
        predicted_BL: [B, L] log-probabilities, column t of which is of token t + 1; the last column is of no token.
        batch: the batch that went in.

    Returns:
        [B, R], column t of which belongs to response column t; NaN outside of the response.
    """
    end = predicted_BL.shape[1] - 1
    return np.where(batch.response_BR, predicted_BL[:, end - batch.response_BR.shape[1] : end], np.nan)


def _whole(values_R: np.ndarray, prompt: int, response: int, fill: float) -> np.ndarray:
    return np.concatenate([np.full(prompt, fill, values_R.dtype), values_R[len(values_R) - response :]])
