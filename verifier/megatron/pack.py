"""Packing of rollouts into one batch; the only place where labels are shifted by one.

Shape suffixes: T rows of the pack (or of one context-parallel shard), S sub-sequences, N real tokens, L tokens of one
rollout, M mixture-of-experts layers, K experts per token.

A packed batch has two kinds of rows. *Row-aligned* tensors (tokens, positions, roles, routes) describe the token that
enters the model at a row. *Label-aligned* tensors (labels, loss mask, engine log-probabilities, versions, ledger)
describe the token that the row's logits predict: the next one of the same sub-sequence.
"""
# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import DTypeLike

from verifier.data.rollout import MISSING_ROUTE, PROMPT_VALUES, Rollout, make_rollout
from verifier.errors import ContractError
from verifier.megatron.token_layout import Alignment, cp_rows, lay_out

IGNORE_LABEL = -100
"""Label of a row that predicts nothing: a padding row, or the last row of a sub-sequence."""
PADDING = -1
"""Segment of padding rows."""
POSITION_BITS = 32
"""Bits of a position in a sentinel, see `PackedBatch.ledger_T`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch, or one context-parallel rank's shard of it."""

    ids: tuple[str, ...]
    """Rollout id of each sub-sequence, in pack order; empty for a filler micro-batch."""
    groups: tuple[str, ...]
    """Prompt group of each sub-sequence."""
    rewards: tuple[float, ...]
    """Reward of each sub-sequence."""
    prompt_lengths: tuple[int, ...]
    """Prompt length of each sub-sequence, in tokens."""
    alignment: Alignment
    cu_seqlens: torch.Tensor
    """[S + 1] int32, cumulative real lengths of the whole pack."""
    cu_seqlens_padded: torch.Tensor
    """[S + 1] int32, first row of each sub-sequence in the whole pack; the last entry is the pack's length."""
    max_seqlen: int
    """Length of the longest padded sub-sequence, in rows."""
    rows_T: torch.Tensor
    """int64, index of each row in the whole pack."""
    tokens_T: torch.Tensor
    """int64, input token ids; 0 in padding."""
    positions_T: torch.Tensor
    """int64, position within the sub-sequence; 0 in padding, but for a filler's."""
    segments_T: torch.Tensor
    """int32, index of the sub-sequence; `PADDING` in padding."""
    roles_T: torch.Tensor
    """int8, `Role` of the input token."""
    labels_T: torch.Tensor
    """int64, the next token of the same sub-sequence; `IGNORE_LABEL` where there is none."""
    loss_mask_T: torch.Tensor
    """bool, True where the label is in the loss."""
    sampled_T: torch.Tensor
    """bool, True where the label was drawn from the policy."""
    engine_logprobs_T: torch.Tensor
    """float32, the engine's log-probability of the label, nats; NaN where it was not sampled."""
    versions_T: torch.Tensor
    """int32, version of the weights that sampled the label."""
    ledger_T: torch.Tensor | None
    """int64, sentinel of the label: (number of its rollout + 1) * 2^32 + its position; 0 where there is none. An
    off-by-one, a wrong chunk order or a swapped field keeps all shapes, but not the sentinels (PCK001). None in
    a pass without `on_shards`."""
    routes_TMK: torch.Tensor | None
    """int32, experts of the input token; `MISSING_ROUTE` in padding and where the engine reported none."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[T] float32 each, of the label: inputs of the loss that were computed before the batch was split, such as its
    weight; 0 where there is no label."""

    @property
    def num_rows(self) -> int:
        """Number of rows of this batch or shard."""
        return len(self.tokens_T)

    @property
    def num_whole_rows(self) -> int:
        """Number of rows of the whole pack."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def has_padding_between(self) -> bool:
        """True if padding lies between parts that attention sees by themselves.

        With context parallelism each sub-sequence is 2 cp such parts, so padding after the last one counts. Transformer
        Engine's own guess, where Megatron says nothing, leaves it out (TransformerEngine#3331): keys are dropped then.
        """
        last = None if self.alignment.cp > 1 else -1
        return not self.cu_seqlens[:last].equal(self.cu_seqlens_padded[:last])


Columns = Mapping[str, Sequence[np.ndarray]]
"""Name -> per rollout [L] values of its tokens; entry t belongs to token t."""


def pack(
    rollouts: Sequence[Rollout],
    alignment: Alignment,
    numbers: Sequence[int] | None = None,
    columns: Columns | None = None,
) -> PackedBatch:
    """Concatenate rollouts, each padded on its own, and shift labels and masks within each.

    Args:
        rollouts: sub-sequences of the pack, in order. None at all gives a filler: one sub-sequence of padding that
            predicts nothing, for a data-parallel rank with fewer micro-batches than others.
        alignment: multiples to pad to.
        numbers: of each rollout in the whole step, for the ledger; None packs no ledger.
        columns: further values of each token, packed as `PackedBatch.columns`.

    Returns:
        The whole pack; `shard_cp` returns one context-parallel rank's shard.

    Raises:
        ContractError: only some rollouts carry routes, or they are of several shapes.
    """
    if not rollouts:
        blank = pack([make_rollout("filler", np.zeros(alignment.total_multiple, np.int64))], alignment)
        return replace(
            blank, ids=(), groups=(), rewards=(), prompt_lengths=(),
            segments_T=torch.full_like(blank.segments_T, PADDING),
            labels_T=torch.full_like(blank.labels_T, IGNORE_LABEL),
            ledger_T=None if numbers is None else torch.zeros_like(blank.labels_T),
            columns={name: torch.zeros(blank.num_rows) for name in columns or ()},
        )  # fmt: skip
    lengths_S = np.array([len(rollout) for rollout in rollouts])
    cu_seqlens, cu_seqlens_padded = lay_out(lengths_S, alignment)
    padded_S = np.diff(cu_seqlens_padded)
    lengths, gaps = lengths_S.tolist(), (padded_S - lengths_S).tolist()

    def by_row(values: Sequence[np.ndarray], fill: np.generic) -> torch.Tensor:
        padding = np.full((max(gaps), *values[0].shape[1:]), fill)
        return _joined(values, [padding[:gap] for gap in gaps], fill.dtype)

    def by_label(values: Sequence[np.ndarray], fill: np.generic) -> torch.Tensor:
        padding = np.full(max(gaps) + 1, fill)
        return _joined([array[1:] for array in values], [padding[: gap + 1] for gap in gaps], fill.dtype)

    def answers(name: str) -> torch.Tensor:
        return by_label([getattr(rollout, name) for rollout in rollouts], PROMPT_VALUES[name])

    position = np.arange(max(lengths))
    segment = np.arange(len(rollouts), dtype=np.int32)

    def ledger(numbers: Sequence[int]) -> torch.Tensor:
        firsts = [(number + 1) << POSITION_BITS for number in numbers]
        return by_label([first + position[:size] for first, size in zip(firsts, lengths, strict=True)], np.int64(0))

    return PackedBatch(
        ids=tuple(rollout.id for rollout in rollouts),
        groups=tuple(rollout.group for rollout in rollouts),
        rewards=tuple(rollout.reward for rollout in rollouts),
        prompt_lengths=tuple(rollout.prompt_length for rollout in rollouts),
        alignment=alignment,
        cu_seqlens=torch.from_numpy(cu_seqlens),
        cu_seqlens_padded=torch.from_numpy(cu_seqlens_padded),
        max_seqlen=int(padded_S.max()),
        rows_T=torch.arange(int(cu_seqlens_padded[-1])),
        tokens_T=by_row([rollout.tokens for rollout in rollouts], np.int64(0)),
        positions_T=by_row([position[:length] for length in lengths], np.int64(0)),
        segments_T=by_row(np.split(np.repeat(segment, lengths), cu_seqlens[1:-1]), np.int32(PADDING)),
        roles_T=by_row([rollout.roles for rollout in rollouts], PROMPT_VALUES["roles"]),
        labels_T=by_label([rollout.tokens for rollout in rollouts], np.int64(IGNORE_LABEL)),
        loss_mask_T=answers("mask"),
        sampled_T=answers("sampled"),
        engine_logprobs_T=answers("logprobs"),
        versions_T=answers("versions"),
        ledger_T=None if numbers is None else ledger(numbers),
        routes_TMK=_routes(rollouts, by_row),
        columns={name: by_label(values, np.float32(0)) for name, values in (columns or {}).items()},
    )


def shard_cp(packed: PackedBatch, cp_rank: int) -> PackedBatch:
    """Return the rows of one context-parallel rank; cumulative lengths stay those of the whole pack.

    Raises:
        ContractError: the pack is a shard already.
    """
    if packed.num_rows != packed.num_whole_rows:
        raise ContractError("a shard of a pack cannot be sharded again")
    rows = torch.from_numpy(cp_rows(packed.cu_seqlens_padded.numpy(), packed.alignment.cp, cp_rank))
    names = [item.name for item in fields(packed) if item.name.endswith(("_T", "_TMK"))]
    cut = {name: getattr(packed, name)[rows] for name in names if getattr(packed, name) is not None}
    return replace(packed, **cut, columns={name: values[rows] for name, values in packed.columns.items()})


def loss_rows(batches: Sequence[PackedBatch]) -> dict[str, np.ndarray]:
    """Rows as the loss gets them from packs or shards with a ledger, a value a row by name.

    Nothing is shared with the batches.
    """

    def cat(name: str) -> np.ndarray:
        return torch.cat([getattr(batch, name) for batch in batches]).numpy()

    def by_rollout(values: Sequence[Sequence[float]], fill: float, dtype: DTypeLike) -> np.ndarray:
        return np.concatenate(
            [
                np.array([*own, fill], dtype)[batch.segments_T.numpy()]  # padding's -1 takes the last entry
                for own, batch in zip(values, batches, strict=True)
            ]
        )

    def checksums(names: Sequence[Sequence[str]]) -> np.ndarray:
        return by_rollout([[zlib.crc32(name.encode()) for name in own] for own in names], 0, np.uint32)

    return {
        "sentinel": cat("ledger_T"),
        "input": cat("tokens_T"),
        "position": cat("positions_T"),
        "role": cat("roles_T"),
        "label": cat("labels_T"),
        "mask": cat("loss_mask_T"),
        "sampled": cat("sampled_T"),
        "engine_logprob": cat("engine_logprobs_T"),
        "version": cat("versions_T"),
        "reward": by_rollout([batch.rewards for batch in batches], np.nan, np.float64),
        "group": checksums([batch.groups for batch in batches]),
        "id": checksums([batch.ids for batch in batches]),
        "prompt": by_rollout([batch.prompt_lengths for batch in batches], 0, np.int64),
    }


def _joined(values: Sequence[np.ndarray], paddings: Sequence[np.ndarray], dtype: DTypeLike) -> torch.Tensor:
    pieces = [piece for pair in zip(values, paddings, strict=True) for piece in pair]
    return torch.from_numpy(np.concatenate(pieces, dtype=dtype))


def _routes(rollouts: Sequence[Rollout], by_row: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    shapes = [None if rollout.routes is None else rollout.routes.shape[1:] for rollout in rollouts]
    if not any(shapes):
        return None
    wanted = next(shape for shape in shapes if shape)
    for rollout, shape in zip(rollouts, shapes, strict=True):
        if shape != wanted:
            raise ContractError(
                f"rollout `{rollout.id}` has routes of [layers, experts per token] = {shape and list(shape)}, "
                f"others of the same pack have {list(wanted)}"
            )
    return by_row([rollout.routes for rollout in rollouts], np.int32(MISSING_ROUTE))
