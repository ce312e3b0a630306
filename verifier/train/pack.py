"""Packing of rollouts into one batch and back; the only place where labels are shifted by one.

Shape suffixes: T rows of the pack (or of one context-parallel shard), S sub-sequences, N real tokens, L tokens of one
rollout, M mixture-of-experts layers, K experts per token.

A packed batch has two kinds of rows. *Row-aligned* tensors (tokens, positions, roles, routes) describe the token that
enters the model at a row. *Label-aligned* tensors (labels, loss mask, engine log-probabilities, versions, extras)
describe the token that the row's logits predict: the next one of the same sub-sequence.
"""
# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import DTypeLike

from verifier.data.rollout import MISSING_ROUTE, PROMPT_VALUES, Role, Rollout
from verifier.errors import ContractError
from verifier.train.token_layout import Alignment, cp_rows, lay_out

IGNORE_LABEL = -100
"""Label of a row that predicts nothing: a padding row, or the last row of a sub-sequence."""
PADDING = -1
"""Segment of padding rows."""


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
    """int64, input token ids."""
    positions_T: torch.Tensor
    """int64, position within the sub-sequence; 0 in padding."""
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
    routes_TMK: torch.Tensor | None
    """int32, experts of the input token; `MISSING_ROUTE` in padding and where the engine reported none."""
    extra: Mapping[str, torch.Tensor]
    """Label-aligned tensors of the caller; NaN, or 0 for integers, without a label. A filler has float32 NaN."""

    @property
    def num_rows(self) -> int:
        """Number of rows of this batch or shard."""
        return len(self.tokens_T)

    @property
    def num_whole_rows(self) -> int:
        """Number of rows of the whole pack."""
        return int(self.cu_seqlens_padded[-1])


_ROW_FIELDS = tuple(field.name for field in fields(PackedBatch) if field.name.endswith(("_T", "_TMK")))
_LABEL_FIELDS = {
    "mask": "loss_mask_T",
    "sampled": "sampled_T",
    "logprobs": "engine_logprobs_T",
    "versions": "versions_T",
}
"""Per-token field of a rollout -> label-aligned field of the pack; both have the value of a prompt token in padding."""


def pack(
    rollouts: Sequence[Rollout],
    alignment: Alignment,
    *,
    pad_token: int = 0,
    extra: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> PackedBatch:
    """Concatenate rollouts, each padded on its own, and shift labels and masks within each.

    Args:
        rollouts: sub-sequences of the pack, in order. None at all gives a filler: one sub-sequence of padding that
            predicts nothing, for a data-parallel rank with fewer micro-batches than others.
        alignment: multiples to pad to.
        pad_token: token id of padding rows.
        extra: name -> one [L] array per rollout, further per-token values.

    Returns:
        The whole pack; `shard_cp` returns one context-parallel rank's shard.

    Raises:
        ContractError: an extra array disagrees with its rollout's length, or only some rollouts carry routes.
    """
    extra = extra or {}
    if not rollouts:
        return _filler(alignment, pad_token, sorted(extra))
    layout = lay_out(np.array([len(rollout) for rollout in rollouts]), alignment)
    gaps = (layout.padded_S - layout.lengths_S).tolist()

    def by_row(values: Sequence[np.ndarray], fill: np.generic) -> torch.Tensor:
        padding = np.full((max(gaps), *values[0].shape[1:]), fill)
        return _joined(values, [padding[:gap] for gap in gaps], fill.dtype)

    def by_label(values: Sequence[np.ndarray], fill: np.generic) -> torch.Tensor:
        padding = np.full(max(gaps) + 1, fill)
        return _joined([array[1:] for array in values], [padding[: gap + 1] for gap in gaps], fill.dtype)

    lengths = layout.lengths_S.tolist()
    position = np.arange(max(lengths))
    segment = np.arange(len(rollouts), dtype=np.int32)
    return PackedBatch(
        ids=tuple(rollout.id for rollout in rollouts),
        groups=tuple(rollout.group for rollout in rollouts),
        rewards=tuple(rollout.reward for rollout in rollouts),
        prompt_lengths=tuple(rollout.prompt_length for rollout in rollouts),
        alignment=alignment,
        cu_seqlens=torch.from_numpy(layout.cu_seqlens),
        cu_seqlens_padded=torch.from_numpy(layout.cu_seqlens_padded),
        max_seqlen=int(layout.padded_S.max()),
        rows_T=torch.arange(layout.num_rows),
        tokens_T=by_row([rollout.tokens for rollout in rollouts], np.int64(pad_token)),
        positions_T=by_row([position[:length] for length in lengths], np.int64(0)),
        segments_T=by_row(np.split(np.repeat(segment, lengths), layout.cu_seqlens[1:-1]), np.int32(PADDING)),
        roles_T=by_row([rollout.roles for rollout in rollouts], PROMPT_VALUES["roles"]),
        labels_T=by_label([rollout.tokens for rollout in rollouts], np.int64(IGNORE_LABEL)),
        **{
            field: by_label([getattr(rollout, name) for rollout in rollouts], PROMPT_VALUES[name])
            for name, field in _LABEL_FIELDS.items()
        },
        routes_TMK=_routes(rollouts, by_row),
        extra={name: by_label(*_extra_values(name, values, rollouts)) for name, values in sorted(extra.items())},
    )


def shard_cp(packed: PackedBatch, cp_rank: int) -> PackedBatch:
    """Return the rows of one context-parallel rank; cumulative lengths stay those of the whole pack.

    Raises:
        ContractError: the pack is a shard already.
    """
    if packed.num_rows != packed.num_whole_rows:
        raise ContractError("a shard of a pack cannot be sharded again")
    rows = torch.from_numpy(cp_rows(packed.cu_seqlens_padded.numpy(), packed.alignment.cp, cp_rank))
    held = {name: getattr(packed, name)[rows] for name in _ROW_FIELDS if getattr(packed, name) is not None}
    return replace(packed, **held, extra={name: values[rows] for name, values in packed.extra.items()})


def unshard_cp(shards: Sequence[torch.Tensor], cu_seqlens_padded: torch.Tensor) -> torch.Tensor:
    """Join values of all context-parallel ranks to those of the whole pack; inverse of `shard_cp`.

    Args:
        shards: one [T / cp, ...] tensor per rank, in rank order.
        cu_seqlens_padded: [S + 1] of the whole pack.

    Returns:
        [T, ...] in the shards' dtype, on their device.
    """
    whole = torch.empty((int(cu_seqlens_padded[-1]), *shards[0].shape[1:]), dtype=shards[0].dtype).to(shards[0].device)
    for cp_rank, values in enumerate(shards):
        rows = torch.from_numpy(cp_rows(cu_seqlens_padded.cpu().numpy(), len(shards), cp_rank))
        if len(rows) != len(values):
            raise ContractError(f"context-parallel rank {cp_rank} gave {len(values)} rows, {len(rows)} are expected")
        whole[rows.to(whole.device)] = values
    return whole


def unpack_rows(values_T: torch.Tensor, packed: PackedBatch) -> list[torch.Tensor]:
    """Split row-aligned values of the whole pack into one [L, ...] tensor per rollout, without padding.

    Raises:
        ContractError: there are not as many values as rows of the whole pack.
    """
    if len(values_T) != packed.num_whole_rows:
        raise ContractError(
            f"{len(values_T)} values for a pack of {packed.num_whole_rows} rows: gather shards with `unshard_cp` first"
        )
    starts = packed.cu_seqlens_padded.tolist()
    lengths = torch.diff(packed.cu_seqlens).tolist()
    return [values_T[starts[at] : starts[at] + lengths[at]] for at in range(len(packed.ids))]


def unpack_labels(values_T: torch.Tensor, packed: PackedBatch, *, first: float = float("nan")) -> list[torch.Tensor]:
    """Split label-aligned values of the whole pack by rollout and shift them so that entry t belongs to token t.

    Args:
        values_T: one value per row of the whole pack, such as the trainer's log-probabilities.
        packed: the pack.
        first: entry 0 of each result, as no row predicts the first token.

    Returns:
        One [L] tensor per rollout.
    """
    rows = unpack_rows(values_T, packed)
    return [torch.cat([torch.full_like(values[:1], first), values[:-1]]) for values in rows]


def unpack(packed: PackedBatch) -> list[Rollout]:
    """Return the rollouts that were packed, equal in every field."""
    tokens, roles = unpack_rows(packed.tokens_T, packed), unpack_rows(packed.roles_T, packed)
    routes = None if packed.routes_TMK is None else unpack_rows(packed.routes_TMK, packed)
    labels = {
        name: unpack_labels(getattr(packed, field), packed, first=PROMPT_VALUES[name].item())
        for name, field in _LABEL_FIELDS.items()
    }
    return [
        Rollout(
            id=packed.ids[at],
            group=packed.groups[at],
            tokens=tokens[at].numpy(),
            prompt_length=packed.prompt_lengths[at],
            roles=roles[at].numpy(),
            reward=packed.rewards[at],
            routes=None if routes is None else routes[at].numpy(),
            **{name: values[at].numpy() for name, values in labels.items()},
        )
        for at in range(len(packed.ids))
    ]


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


def _extra_values(
    name: str, values: Sequence[np.ndarray], rollouts: Sequence[Rollout]
) -> tuple[Sequence[np.ndarray], np.generic]:
    for rollout, array in zip(rollouts, values, strict=True):
        if array.shape != (len(rollout),):
            raise ContractError(
                f"rollout `{rollout.id}`: `{name}` has shape {list(array.shape)} for {len(rollout)} tokens"
            )
    dtype = values[0].dtype
    return values, dtype.type(np.nan if dtype.kind == "f" else 0)


def _filler(alignment: Alignment, pad_token: int, names: Sequence[str]) -> PackedBatch:
    num_rows = alignment.total_multiple
    ends = torch.tensor([0, num_rows], dtype=torch.int32)
    return PackedBatch(
        ids=(),
        groups=(),
        rewards=(),
        prompt_lengths=(),
        alignment=alignment,
        cu_seqlens=ends,
        cu_seqlens_padded=ends.clone(),
        max_seqlen=num_rows,
        rows_T=torch.arange(num_rows),
        tokens_T=torch.full((num_rows,), pad_token),
        positions_T=torch.arange(num_rows),
        segments_T=torch.full((num_rows,), PADDING, dtype=torch.int32),
        roles_T=torch.full((num_rows,), int(Role.PROMPT), dtype=torch.int8),
        labels_T=torch.full((num_rows,), IGNORE_LABEL),
        **{field: torch.from_numpy(np.full(num_rows, PROMPT_VALUES[name])) for name, field in _LABEL_FIELDS.items()},
        routes_TMK=None,
        extra={name: torch.full((num_rows,), float("nan")) for name in names},
    )
