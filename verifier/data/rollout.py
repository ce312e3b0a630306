"""One rollout: tokens and, per token, author, loss mask, log-probability, weight version and expert routes.

Shape suffixes: L tokens of one rollout, M mixture-of-experts layers in global order, K experts per token.

File of a batch: arrays are flat over the tokens of all rollouts, in order; ids, groups, lengths and rewards are JSON in
the header.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verifier.core import ragged
from verifier.core.record import as_numpy
from verifier.errors import UsageError

MISSING_ROUTE = -1
"""Expert id of a route that the engine did not report. Replaying it is an error (`megatron/router_replay.py`)."""
NO_VERSION = -1
"""Weight version of a token that no weights sampled: prompt and tool output."""


class Role(enum.IntEnum):
    """Author of a token."""

    PROMPT = 0
    ASSISTANT = 1
    TOOL = 2


PROMPT_VALUES: Mapping[str, np.generic] = {
    "sampled": np.bool_(False),
    "mask": np.bool_(False),
    "roles": np.int8(Role.PROMPT),
    "logprobs": np.float32(np.nan),
    "versions": np.int32(NO_VERSION),
}
"""Per-token field of `Rollout` to its value for a prompt token, in the field's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sequence of tokens and what is known about each token.

    Entry t of every per-token array belongs to token t. The shift by one between a token and the row of logits that
    predicts it happens in `verifier.megatron.pack` and nowhere else.

    Raises:
        UsageError: the rollout is empty, an array has another length than `tokens`, a token of the prompt is marked as
            sampled, or a token in the loss mask was not sampled.
    """

    id: str
    group: str
    """Name shared by all rollouts of one prompt; advantages are computed within it."""
    tokens: np.ndarray
    """[L] int64."""
    prompt_length: int
    """Number of leading tokens given to the engine before it sampled anything; at least 1."""
    sampled: np.ndarray
    """[L] bool, True for tokens drawn from the policy; False for the prompt and for tool output between turns."""
    mask: np.ndarray
    """[L] bool, True for tokens in the loss; a subset of `sampled`."""
    roles: np.ndarray
    """[L] int8, `Role`."""
    logprobs: np.ndarray
    """[L] float32, log-probabilities reported by the engine, nats; NaN where not sampled."""
    versions: np.ndarray
    """[L] int32, version of the weights that sampled the token; `NO_VERSION` where not sampled."""
    reward: float = 0.0
    routes: np.ndarray | None = None
    """[L, M, K] integer, expert ids that the engine chose; `MISSING_ROUTE` where it reported none."""

    def __post_init__(self) -> None:
        if disagreement := self._disagreement():
            raise UsageError(f"rollout `{self.id}`{disagreement}")

    def _disagreement(self) -> str:
        """The rest of the sentence that says what does not fit together; empty if all does."""
        length = len(self.tokens)
        if length == 0:
            return " is empty: it has no tokens"
        for name in PROMPT_VALUES:
            shape = getattr(self, name).shape
            if shape != (length,):
                return f": {name} has shape {list(shape)}, but there are {length} tokens"
        if self.routes is not None and (self.routes.ndim != 3 or len(self.routes) != length):
            expected = f"[{length} tokens, layers, experts per token]"
            return f": routes have shape {list(self.routes.shape)}, expected {expected}"
        if not 1 <= self.prompt_length <= length:
            why = "the first token has no predecessor to be predicted from"
            return f": prompt length {self.prompt_length} is outside of 1 to {length}: {why}"
        if self.sampled[: self.prompt_length].any():
            return f": token {self.sampled.argmax()} is marked as sampled, but lies in the prompt"
        outside = self.mask & ~self.sampled
        return f": token {outside.argmax()} is in the loss mask, but was not sampled" if outside.any() else ""

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Rollout({self.id!r}, prompt={self.prompt_length}, response={self.response_length})"

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, tool output included."""
        return len(self.tokens) - self.prompt_length


def route_rows(rollouts: Sequence[Rollout], layers: Sequence[int]) -> np.ndarray:
    """Routes of rollouts, in a row each: index of the rollout, position, global layer, experts.

    Args:
        rollouts: with routes.
        layers: global indices of the layers with routers, in the order of the routes' M axis.

    Returns:
        [N, 3 + K] int32, without the tokens that have no route.
    """
    parts = []
    for index, rollout in enumerate(rollouts):
        assert rollout.routes is not None
        position, column = np.nonzero((rollout.routes != MISSING_ROUTE).all(-1))
        where = np.stack([np.full_like(position, index), position, np.asarray(layers)[column]], axis=-1)
        parts.append(np.concatenate([where, rollout.routes[position, column]], axis=-1))
    return np.concatenate(parts).astype(np.int32)


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
    """Build a rollout from the token ids of a prompt and of a response, which holds sampled tokens and tool output.

    The id is unique, and every error names it; it is the group too where none is given. `sampled` (all by default),
    `mask` (those sampled), `logprobs` (nats, NaN) and `versions` (or one for all) are [response]; `routes` are
    [prompt + response, M, K]. The reward is that of the whole rollout.

    Raises:
        UsageError: an array has another length than the response; or see `Rollout`.
    """
    tokens = np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])
    drawn = np.ones(len(response), bool) if sampled is None else np.asarray(sampled, bool)
    response_values = {
        "sampled": drawn,
        "mask": drawn if mask is None else mask,
        "roles": np.where(drawn, Role.ASSISTANT, Role.TOOL),
        "logprobs": np.nan if logprobs is None else logprobs,
        "versions": versions,
    }
    arrays: dict[str, np.ndarray] = {}
    for name, prompt_value in PROMPT_VALUES.items():
        values = np.asarray(response_values[name], prompt_value.dtype)
        if values.ndim and len(values) != len(response):
            raise UsageError(
                f"rollout `{rollout_id}`: {name} has {len(values)} entries for {len(response)} response tokens"
            )
        arrays[name] = np.full(len(tokens), prompt_value)
        arrays[name][len(prompt) :] = values
    for name in ("logprobs", "versions"):
        arrays[name][~arrays["sampled"]] = PROMPT_VALUES[name]
    return Rollout(
        id=rollout_id,
        group=rollout_id if group is None else group,
        tokens=tokens,
        prompt_length=len(prompt),
        reward=reward,
        routes=routes,
        **arrays,
    )


_FIELDS = ("tokens", *PROMPT_VALUES)
_COLUMN = "column."
_ROUTES = "routes"


def save_rollouts(
    path: Path, rollouts: Sequence[Rollout], columns: Mapping[str, Sequence[np.ndarray]] | None = None
) -> None:
    """Write a batch of one or more rollouts, all or none with routes; the file appears when it is whole.

    `columns` are further values: name -> per rollout [L] values of its tokens.

    Raises:
        UsageError: the file cannot be written.
    """
    from safetensors.numpy import save

    arrays = {name: np.concatenate([getattr(item, name) for item in rollouts]) for name in _FIELDS}
    arrays["tokens"] = as_numpy(arrays["tokens"])
    arrays |= {_COLUMN + name: np.concatenate([*values]) for name, values in (columns or {}).items()}
    if routes := [item.routes for item in rollouts if item.routes is not None]:
        arrays[_ROUTES] = np.concatenate(routes)
    about = {
        "ids": [item.id for item in rollouts],
        "groups": [item.group for item in rollouts],
        "lengths": [len(item) for item in rollouts],
        "prompt_lengths": [item.prompt_length for item in rollouts],
        "rewards": [item.reward for item in rollouts],
    }
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_bytes(save(arrays, {"rollouts": json.dumps(about)}))
        aside.replace(path)
    except OSError as problem:
        raise UsageError(f"the batch `{path}` cannot be written: {problem.strerror}") from problem


def load_rollouts(batch: Path | bytes) -> tuple[list[Rollout], dict[str, list[np.ndarray]]]:
    """Read what `save_rollouts` wrote, a file or its contents: the rollouts and the further values."""
    from safetensors.numpy import load

    contents = batch.read_bytes() if isinstance(batch, Path) else batch
    arrays = dict(sorted(load(contents).items()))  # safetensors' own order differs from process to process
    header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")])
    about = json.loads(header["__metadata__"]["rollouts"])
    arrays["tokens"] = arrays["tokens"].astype(np.int64)
    parts = {name: ragged.split(array, about["lengths"]) for name, array in arrays.items()}
    rollouts = [
        Rollout(
            id=about["ids"][at], group=about["groups"][at], prompt_length=about["prompt_lengths"][at],
            reward=about["rewards"][at], routes=parts[_ROUTES][at] if _ROUTES in parts else None,
            **{name: parts[name][at] for name in _FIELDS},
        )
        for at in range(len(about["ids"]))
    ]  # fmt: skip
    # In order, on every rank: the library's is another in every process.
    return rollouts, {name.removeprefix(_COLUMN): parts[name] for name in sorted(parts) if name.startswith(_COLUMN)}
