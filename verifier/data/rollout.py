"""What a rollout is: tokens, and for each token who wrote it, whether it is trained on, which weights sampled it.

Shape suffixes: L tokens of one rollout, M mixture-of-experts layers in global order, K experts per token.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.errors import UsageError

MISSING_ROUTE = -1
"""Route of a token that the engine did not report; it is an error to replay it (verifier/train/router_replay.py)."""
NO_VERSION = -1
"""Weight version of a token that no weights sampled: prompts and tool output."""


class Role(enum.IntEnum):
    """Who wrote a token."""

    PROMPT = 0
    ASSISTANT = 1
    TOOL = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sequence of tokens with everything that is known about each token, aligned to the token itself.

    Entry t of every per-token array belongs to token t. The shift by one between a token and the row of logits that
    predicts it happens in `verifier.train.pack` and nowhere else.

    Raises:
        UsageError: an array disagrees in length, the rollout is empty, the first token is sampled (no row of logits
            predicts it), a trained-on token was not sampled, or a sampled token has no log-probability.
    """

    id: str
    group: str
    """Rollouts of one prompt share it; advantages are taken within it."""
    tokens: np.ndarray
    """[L] int64."""
    prompt_length: int
    """Leading tokens given to the engine before anything was sampled, at least 1."""
    sampled: np.ndarray
    """[L] bool: drawn from the policy. False for the prompt and for tool output between turns."""
    mask: np.ndarray
    """[L] bool: counts in the loss; only sampled tokens may."""
    roles: np.ndarray
    """[L] int8, `Role`."""
    logprobs: np.ndarray
    """[L] float32, nats, the engine's; NaN where not sampled."""
    versions: np.ndarray
    """[L] int32, the weights that sampled the token; `NO_VERSION` where not sampled."""
    reward: float = 0.0
    routes: np.ndarray | None = None
    """[L, M, K] integer expert ids that the engine chose; `MISSING_ROUTE` where it reported none."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0:
            raise UsageError(f"rollout `{self.id}` is empty: it has no tokens")
        for name in ("sampled", "mask", "roles", "logprobs", "versions"):
            if getattr(self, name).shape != (length,):
                raise UsageError(
                    f"rollout `{self.id}`: {name} has shape {list(getattr(self, name).shape)}, "
                    f"but there are {length} tokens"
                )
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) != length):
            raise UsageError(
                f"rollout `{self.id}`: routes have shape {list(self.routes.shape)}, "
                f"expected [{length} tokens, layers, experts per token]"
            )
        if not 1 <= self.prompt_length <= length:
            raise UsageError(
                f"rollout `{self.id}`: prompt length {self.prompt_length} is outside of 1 to {length}: "
                "the first token has no predecessor to be predicted from"
            )
        if self.sampled[: self.prompt_length].any():
            at = int(self.sampled.argmax())
            raise UsageError(f"rollout `{self.id}`: token {at} is marked as sampled, but lies in the prompt")
        if (self.mask & ~self.sampled).any():
            at = int((self.mask & ~self.sampled).argmax())
            raise UsageError(f"rollout `{self.id}`: token {at} is in the loss mask, but was not sampled")

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Rollout({self.id!r}, prompt={self.prompt_length}, response={self.response_length})"

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, tool output included."""
        return len(self.tokens) - self.prompt_length


def make_rollout(
    rollout_id: str,
    prompt: Sequence[int] | np.ndarray,
    response: Sequence[int] | np.ndarray = (),
    *,
    group: str | None = None,
    sampled: Sequence[bool] | np.ndarray | None = None,
    mask: Sequence[bool] | np.ndarray | None = None,
    logprobs: Sequence[float] | np.ndarray | None = None,
    versions: Sequence[int] | np.ndarray | int = 0,
    reward: float = 0.0,
    routes: np.ndarray | None = None,
) -> Rollout:
    """Build a rollout from a prompt and a response.

    Args:
        rollout_id: unique name; every error names it.
        prompt: token ids.
        response: token ids; sampled ones and tool output.
        group: prompt group; the rollout id by default.
        sampled: [response] drawn from the policy; all by default, the others are tool output.
        mask: [response] counts in the loss; the sampled ones by default.
        logprobs: [response] the engine's, nats; NaN by default.
        versions: [response], or one for all: the weights that sampled each token.
        reward: of the whole rollout.
        routes: [prompt + response, M, K] expert ids.

    Raises:
        UsageError: see `Rollout`.
    """
    tokens = np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])
    num_prompt, num_response = len(prompt), len(response)
    drawn = np.ones(num_response, bool) if sampled is None else np.asarray(sampled, bool)
    kept = drawn if mask is None else np.asarray(mask, bool)
    nats = np.full(num_response, np.nan, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    weights = np.asarray(versions, np.int32)
    weights = np.full(num_response, weights) if weights.ndim == 0 else weights
    for name, values in (("sampled", drawn), ("mask", kept), ("logprobs", nats), ("versions", weights)):
        if len(values) != num_response:
            raise UsageError(
                f"rollout `{rollout_id}`: {name} has {len(values)} entries for {num_response} response tokens"
            )
    roles = np.where(drawn, np.int8(Role.ASSISTANT), np.int8(Role.TOOL))
    return Rollout(
        id=rollout_id,
        group=rollout_id if group is None else group,
        tokens=tokens,
        prompt_length=num_prompt,
        sampled=np.concatenate([np.zeros(num_prompt, bool), drawn]),
        mask=np.concatenate([np.zeros(num_prompt, bool), kept]),
        roles=np.concatenate([np.full(num_prompt, Role.PROMPT, np.int8), roles]),
        logprobs=np.concatenate([np.full(num_prompt, np.nan, np.float32), np.where(drawn, nats, np.float32(np.nan))]),
        versions=np.concatenate(
            [np.full(num_prompt, NO_VERSION, np.int32), np.where(drawn, weights, NO_VERSION)]
        ).astype(np.int32),
        reward=reward,
        routes=routes,
    )


def check_rollouts(
    rollouts: Sequence[Rollout], *, vocab_size: int | None = None, max_tokens: int | None = None
) -> None:
    """Refuse a batch that cannot be trained on, naming the first rollout that is at fault.

    Args:
        rollouts: the batch.
        vocab_size: token ids must lie in [0, vocab_size).
        max_tokens: longest sequence that fits into a micro-batch, in tokens.

    Raises:
        UsageError: two rollouts share an id, a token id is outside of the vocabulary, or a rollout is too long.
    """
    seen: set[str] = set()
    for rollout in rollouts:
        if rollout.id in seen:
            raise UsageError(f"rollout `{rollout.id}` appears twice in the batch")
        seen.add(rollout.id)
        if max_tokens is not None and len(rollout) > max_tokens:
            raise UsageError(
                f"rollout `{rollout.id}` has {len(rollout):,} tokens, more than the budget of {max_tokens:,} per "
                "micro-batch: raise the budget or shorten the rollout"
            )
    if vocab_size is not None and rollouts:
        tokens_N = np.concatenate([rollout.tokens for rollout in rollouts])
        outside = (tokens_N < 0) | (tokens_N >= vocab_size)
        if outside.any():
            at = int(outside.argmax())
            ends = np.cumsum([len(rollout) for rollout in rollouts])
            which = int(np.searchsorted(ends, at, side="right"))
            position = at - int(ends[which] - len(rollouts[which]))
            raise UsageError(
                f"rollout `{rollouts[which].id}`: token {position} has id {int(tokens_N[at])}, "
                f"outside of the vocabulary of {vocab_size:,}"
            )


def check_groups(rollouts: Sequence[Rollout], group_size: int) -> None:
    """Refuse groups of unequal size: their advantages would be taken over different numbers of rollouts.

    Raises:
        UsageError: names the group, its size and one of its rollouts.
    """
    members: dict[str, list[str]] = {}
    for rollout in rollouts:
        members.setdefault(rollout.group, []).append(rollout.id)
    for group, ids in members.items():
        if len(ids) != group_size:
            raise UsageError(
                f"group `{group}` (rollout `{ids[0]}`) has {len(ids)} rollouts, every group must have {group_size}"
            )
