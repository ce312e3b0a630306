"""Rollouts to a packed batch and back, and the one place where labels are shifted by one.

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

from verifier.data.rollout import MISSING_ROUTE, NO_VERSION, Role, Rollout
from verifier.errors import ContractError
from verifier.train.token_layout import Alignment, cp_rows, lay_out

IGNORE_LABEL = -100
"""Label of a row that predicts nothing: padding, and the last token of each sub-sequence."""
PADDING = -1
"""Segment of a padding row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch, or the part of it that one context-parallel rank holds."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    rewards: tuple[float, ...]
    prompt_lengths: tuple[int, ...]
    """Per sub-sequence, in pack order; empty for a filler micro-batch."""
    alignment: Alignment
    cu_seqlens: torch.Tensor
    """[S + 1] int32, cumulative real lengths of the whole pack."""
    cu_seqlens_padded: torch.Tensor
    """[S + 1] int32, where each sub-sequence begins in the whole pack; the last entry is the pack's length."""
    max_seqlen: int
    """Longest padded sub-sequence."""
    rows_T: torch.Tensor
    """int64, row of the whole pack that each row here is."""
    tokens_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64, position within the sub-sequence; 0 in padding."""
    segments_T: torch.Tensor
    """int32, which sub-sequence; `PADDING` in padding."""
    roles_T: torch.Tensor
    """int8, `Role` of the row's own token."""
    labels_T: torch.Tensor
    """int64, the next token of the same sub-sequence; `IGNORE_LABEL` where there is none."""
    loss_mask_T: torch.Tensor
    """bool, whether the label counts in the loss."""
    sampled_T: torch.Tensor
    """bool, whether the label was drawn from the policy."""
    engine_logprobs_T: torch.Tensor
    """float32, nats, the engine's for the label; NaN where it was not sampled: select rows before computing."""
    versions_T: torch.Tensor
    """int32, weights that sampled the label."""
    routes_TMK: torch.Tensor | None
    """int32, experts of the row's own token; `MISSING_ROUTE` in padding and where the engine reported none."""
    extra: Mapping[str, torch.Tensor]
    """Label-aligned tensors that the caller added: NaN, or 0 for integers, where there is no label; in a filler float32
    NaN throughout."""

    @property
    def num_rows(self) -> int:
        """T, of what is held here."""
        return len(self.tokens_T)

    @property
    def num_whole_rows(self) -> int:
        """T of the whole pack."""
        return int(self.cu_seqlens_padded[-1])


_ROW_FIELDS = tuple(field.name for field in fields(PackedBatch) if field.name.endswith(("_T", "_TMK")))


def pack(
    rollouts: Sequence[Rollout],
    alignment: Alignment,
    *,
    pad_token: int = 0,
    extra: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> PackedBatch:
    """Lay rollouts one after another, each padded on its own, with labels and masks shifted within each.

    Args:
        rollouts: sub-sequences of the pack, in order. None at all gives a filler: one sub-sequence of padding that
            predicts nothing, for a data-parallel rank that has fewer micro-batches than the others.
        alignment: the multiples to pad to.
        pad_token: token id that padding rows hold.
        extra: further per-token arrays, aligned to tokens as the rollouts' own are: name to one [L] array each.

    Returns:
        The whole pack; `shard_cp` gives one context-parallel rank's part.

    Raises:
        ContractError: an extra array disagrees with its rollout's length, or only some rollouts carry routes.
    """
    extra = extra or {}
    if not rollouts:
        return _filler(alignment, pad_token, sorted(extra))
    layout = lay_out(np.array([len(rollout) for rollout in rollouts]), alignment)
    gaps = (layout.padded_S - layout.lengths_S).tolist()

    def by_row(values: Sequence[np.ndarray], fill: float, dtype: DTypeLike) -> torch.Tensor:
        padding = np.full((max(gaps), *values[0].shape[1:]), fill, dtype)
        return _joined(values, [padding[:gap] for gap in gaps], dtype)

    def by_label(values: Sequence[np.ndarray], fill: float, dtype: DTypeLike) -> torch.Tensor:
        padding = np.full(max(gaps) + 1, fill, dtype)
        return _joined([array[1:] for array in values], [padding[: gap + 1] for gap in gaps], dtype)

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
        tokens_T=by_row([rollout.tokens for rollout in rollouts], pad_token, np.int64),
        positions_T=by_row([position[:length] for length in lengths], 0, np.int64),
        segments_T=by_row(np.split(np.repeat(segment, lengths), layout.cu_seqlens[1:-1]), PADDING, np.int32),
        roles_T=by_row([rollout.roles for rollout in rollouts], Role.PROMPT, np.int8),
        labels_T=by_label([rollout.tokens for rollout in rollouts], IGNORE_LABEL, np.int64),
        loss_mask_T=by_label([rollout.mask for rollout in rollouts], False, np.bool_),
        sampled_T=by_label([rollout.sampled for rollout in rollouts], False, np.bool_),
        engine_logprobs_T=by_label([rollout.logprobs for rollout in rollouts], np.nan, np.float32),
        versions_T=by_label([rollout.versions for rollout in rollouts], NO_VERSION, np.int32),
        routes_TMK=_routes(rollouts, by_row),
        extra={name: by_label(*_extra_values(name, values, rollouts)) for name, values in sorted(extra.items())},
    )


def shard_cp(packed: PackedBatch, cp_rank: int) -> PackedBatch:
    """The rows of a whole pack that one context-parallel rank holds; cumulative lengths stay those of the whole.

    Raises:
        ContractError: the pack is a shard already.
    """
    if packed.num_rows != packed.num_whole_rows:
        raise ContractError("a shard of a pack cannot be sharded again")
    rows = torch.from_numpy(cp_rows(packed.cu_seqlens_padded.numpy(), packed.alignment.cp, cp_rank))
    held = {name: getattr(packed, name)[rows] for name in _ROW_FIELDS if getattr(packed, name) is not None}
    return replace(packed, **held, extra={name: values[rows] for name, values in packed.extra.items()})


def unshard_cp(shards: Sequence[torch.Tensor], cu_seqlens_padded: torch.Tensor) -> torch.Tensor:
    """Values of the whole pack from those of all context-parallel ranks, in rank order; inverse of `shard_cp`.

    Args:
        shards: one [T / cp, ...] tensor per rank.
        cu_seqlens_padded: [S + 1] of the whole pack.

    Returns:
        [T, ...], in the shards' dtype and device.
    """
    whole = torch.empty((int(cu_seqlens_padded[-1]), *shards[0].shape[1:]), dtype=shards[0].dtype).to(shards[0].device)
    for cp_rank, values in enumerate(shards):
        rows = torch.from_numpy(cp_rows(cu_seqlens_padded.cpu().numpy(), len(shards), cp_rank))
        if len(rows) != len(values):
            raise ContractError(f"context-parallel rank {cp_rank} gave {len(values)} rows, {len(rows)} are expected")
        whole[rows.to(whole.device)] = values
    return whole


def unpack_rows(values_T: torch.Tensor, packed: PackedBatch) -> list[torch.Tensor]:
    """Row-aligned values of the whole pack, one [L, ...] tensor per rollout; padding is left out.

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
    """Label-aligned values of the whole pack, shifted back so that entry t belongs to token t.

    Args:
        values_T: one value per row of the whole pack, such as the trainer's log-probabilities.
        packed: the pack.
        first: entry 0 of each result, since no row predicts the first token; NaN shows an off-by-one.

    Returns:
        One [L] tensor per rollout.
    """
    rows = unpack_rows(values_T, packed)
    return [torch.cat([torch.full_like(values[:1], first), values[:-1]]) for values in rows]


def unpack(packed: PackedBatch) -> list[Rollout]:
    """The rollouts that were packed, equal in every field."""

    def by_label(values_T: torch.Tensor, first: float) -> list[np.ndarray]:
        return [values.numpy() for values in unpack_labels(values_T, packed, first=first)]

    tokens = unpack_rows(packed.tokens_T, packed)
    roles = unpack_rows(packed.roles_T, packed)
    routes = None if packed.routes_TMK is None else unpack_rows(packed.routes_TMK, packed)
    sampled = by_label(packed.sampled_T, False)
    mask = by_label(packed.loss_mask_T, False)
    logprobs = by_label(packed.engine_logprobs_T, float("nan"))
    versions = by_label(packed.versions_T, NO_VERSION)
    return [
        Rollout(
            id=packed.ids[at],
            group=packed.groups[at],
            tokens=tokens[at].numpy(),
            prompt_length=packed.prompt_lengths[at],
            sampled=sampled[at],
            mask=mask[at],
            roles=roles[at].numpy(),
            logprobs=logprobs[at],
            versions=versions[at],
            reward=packed.rewards[at],
            routes=None if routes is None else routes[at].numpy(),
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
    return by_row([rollout.routes for rollout in rollouts], MISSING_ROUTE, np.int32)


def _extra_values(
    name: str, values: Sequence[np.ndarray], rollouts: Sequence[Rollout]
) -> tuple[Sequence[np.ndarray], float, np.dtype]:
    for rollout, array in zip(rollouts, values, strict=True):
        if array.shape != (len(rollout),):
            raise ContractError(
                f"rollout `{rollout.id}`: `{name}` has shape {list(array.shape)} for {len(rollout)} tokens"
            )
    dtype = values[0].dtype
    return values, (np.nan if dtype.kind == "f" else 0), dtype


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
        loss_mask_T=torch.zeros(num_rows, dtype=torch.bool),
        sampled_T=torch.zeros(num_rows, dtype=torch.bool),
        engine_logprobs_T=torch.full((num_rows,), float("nan")),
        versions_T=torch.full((num_rows,), NO_VERSION, dtype=torch.int32),
        routes_TMK=None,
        extra={name: torch.full((num_rows,), float("nan")) for name in names},
    )
