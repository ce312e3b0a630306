"""Records of the stage `pack`: rollouts to packed, aligned, sharded micro-batches."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, every_rank, first_stage, per_pass
from verifier.core.record import ArrayRecord, Count, Digest, Lengths, RankArrays, RankRecord


class Rollouts(ArrayRecord, frozen=True, kw_only=True, tag="pack/rollouts"):
    """The rollouts of one pass over tokens, as the run handed them in.

    Arrays, each [N] over all tokens of all rollouts in order: ``tokens`` int64; ``sampled`` bool, drawn from the
    policy; ``mask`` bool, in the loss; ``roles`` int8 (0 prompt, 1 assistant, 2 tool); ``logprobs`` float32, nats, the
    engine's, NaN where not sampled; ``versions`` int32, the weights that sampled the token, -1 where none did.
    """

    owed = (Owed(anyone, per_pass),)

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    """Rollouts of one prompt share it."""
    lengths: Lengths
    prompt_lengths: Lengths
    rewards: tuple[float, ...]


class PackedBatchDigest(RankRecord, frozen=True, kw_only=True, tag="pack/batch"):
    """One digest over every field of all micro-batches of a rank."""

    owed = (Owed(every_rank, per_pass),)

    digest: Digest
    micro_batches: Count


class PackLayout(ArrayRecord, frozen=True, kw_only=True, tag="pack/layout"):
    """Cut of one micro-batch. The array [rows] int64 is the row of the whole pack that each row of the shard is."""

    owed = (Owed(first_stage, per_pass),)

    cp_rank: Count
    cu_seqlens: tuple[int, ...]
    """Cumulative lengths, tokens."""
    cu_seqlens_padded: tuple[int, ...]
    """Cumulative padded lengths, rows."""
    max_seqlen: int
    """Longest padded sequence that kernels are told of, rows."""
    lengths: Lengths
    """Tokens of each rollout in it."""
    filler: bool
    """It holds no rollout and keeps collectives in step."""


class TokenLedger(RankArrays, frozen=True, kw_only=True, tag="pack/ledger"):
    """Rows that the loss consumed on one rank, over its micro-batches; every array is [T].

    ``sentinel`` int64, which token of which rollout the row predicts, (rollout + 1) * 2**32 + position, 0 for none;
    ``input`` int64, the token that entered the model; ``position`` int64; ``role`` int8; ``label`` int64; ``mask``,
    ``sampled`` bool; ``engine_logprob`` float32, nats; ``version`` int32; and of the rollout that the row belongs to:
    ``reward`` float64, NaN in padding; ``group`` and ``id`` int64, CRC-32 of each; ``prompt`` int64, its prompt's
    length.
    """

    owed = (Owed(first_stage, per_pass),)
