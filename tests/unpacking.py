"""The inverse of packing: values of a pack, or of all context-parallel shards of one, back to rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verifier.data.rollout import PROMPT_VALUES, Rollout
from verifier.megatron.pack import PackedBatch
from verifier.megatron.token_layout import cp_rows

LABEL_FIELDS = {
    "mask": "loss_mask_T", "sampled": "sampled_T", "logprobs": "engine_logprobs_T", "versions": "versions_T"
}  # fmt: skip
"""Per-token field of a rollout -> label-aligned field of the pack."""


def unshard_cp(shards: Sequence[torch.Tensor], cu_seqlens_padded: torch.Tensor) -> torch.Tensor:
    """Join one [T / cp, ...] tensor per context-parallel rank to [T, ...] of the whole pack."""
    whole = torch.empty((int(cu_seqlens_padded[-1]), *shards[0].shape[1:]), dtype=shards[0].dtype)
    for cp_rank, values in enumerate(shards):
        whole[torch.from_numpy(cp_rows(cu_seqlens_padded.numpy(), len(shards), cp_rank))] = values
    return whole


def unpack_rows(values_T: torch.Tensor, packed: PackedBatch) -> list[torch.Tensor]:
    """Split row-aligned values of the whole pack into one [L, ...] tensor per rollout, without padding."""
    assert len(values_T) == packed.num_whole_rows
    starts, lengths = packed.cu_seqlens_padded.tolist(), torch.diff(packed.cu_seqlens).tolist()
    return [values_T[starts[at] : starts[at] + lengths[at]] for at in range(len(packed.ids))]


def unpack_labels(values_T: torch.Tensor, packed: PackedBatch, *, first: float = float("nan")) -> list[torch.Tensor]:
    """Split label-aligned values so that entry t belongs to token t; `first` is entry 0, which no row predicts."""
    rows = unpack_rows(values_T, packed)
    return [torch.cat([torch.full_like(values[:1], first), values[:-1]]) for values in rows]


def unpack(packed: PackedBatch) -> list[Rollout]:
    """Return the rollouts that were packed, equal in every field."""
    tokens, roles = unpack_rows(packed.tokens_T, packed), unpack_rows(packed.roles_T, packed)
    routes = None if packed.routes_TMK is None else unpack_rows(packed.routes_TMK, packed)
    labels = {
        name: unpack_labels(getattr(packed, field), packed, first=PROMPT_VALUES[name].item())
        for name, field in LABEL_FIELDS.items()
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
