"""Layout of a packed batch: alignment, cumulative lengths, context- and sequence-parallel rows.

Integers only. Shape suffixes: S sub-sequences of a pack, N real tokens, T rows of the pack (real and padding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verifier.errors import ContractError, UsageError

FP8_RECIPES = ("", "blockwise", "mxfp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Multiples to which the sub-sequences of a pack and the whole pack are padded.

    Each sub-sequence is padded to `sequence_multiple`, so that every context-parallel rank gets two equal chunks of it
    and every tensor-parallel rank an equal slice. The last one is padded further, up to `total_multiple`.

    Raises:
        UsageError: a size below 1, or an unknown fp8 recipe.

    Source:
        - Megatron-Core 0.19.2, core/utils.py `_get_batch_on_this_cp_rank_per_document_balancing`: each document's
          padded length is divisible by 2 * cp; sequence parallelism scatters the rows evenly over tp.
        - SkyRL, distributed/megatron/packing_utils.py `get_packed_seq_align_size`: tp, or tp * cp * 2 with cp > 1; with
          fp8 the least common multiple with 16 * cp, with 128 * tp * cp (blockwise, tp > 1), or 32 * tp * cp (mxfp8).
        - verl, models/mcore/util.py `preprocess_packed_seqs`: tp, or tp * cp * 2 with cp > 1; with fp8 each sequence
          to a multiple of 16 and the whole to a multiple of 128 times the alignment without fp8.
        Where they differ the multiple here satisfies both.
    """

    tp: int = 1
    cp: int = 1
    sp: bool = True
    """Switch of sequence parallelism, which needs tp > 1."""
    fp8: str = ""
    """Recipe: "" for none, "blockwise" or "mxfp8"."""

    def __post_init__(self) -> None:
        if self.tp < 1 or self.cp < 1:
            raise UsageError(f"alignment needs tp and cp of at least 1, got tp = {self.tp}, cp = {self.cp}")
        if self.fp8 not in FP8_RECIPES:
            raise UsageError(f"unknown fp8 recipe `{self.fp8}`: choose one of {', '.join(FP8_RECIPES[1:])}, or none")

    @property
    def layout_multiple(self) -> int:
        """Multiple that sharding requires, in tokens."""
        rows_tp = self.tp if self.sp else 1
        return rows_tp * self.cp * 2 if self.cp > 1 else rows_tp

    @property
    def sequence_multiple(self) -> int:
        """Multiple of each sub-sequence's padded length, in tokens."""
        if not self.fp8:
            return self.layout_multiple
        blockwise = 128 * self.tp if self.tp > 1 else 16
        tile = 32 * self.tp if self.fp8 == "mxfp8" else blockwise
        return math.lcm(self.layout_multiple, tile * self.cp)

    @property
    def total_multiple(self) -> int:
        """Multiple of the pack's length, in tokens; itself a multiple of `sequence_multiple`."""
        if not self.fp8:
            return self.sequence_multiple
        return math.lcm(self.sequence_multiple, 128 * self.layout_multiple)

    def padded(self, lengths_S: np.ndarray) -> np.ndarray:
        """Return the padded lengths [S] of sub-sequences, before the whole pack is padded."""
        return -(-lengths_S // self.sequence_multiple) * self.sequence_multiple


def lay_out(lengths_S: np.ndarray, alignment: Alignment) -> tuple[np.ndarray, np.ndarray]:
    """Place sub-sequences of the given numbers of tokens, each at least 1, one after another, each padded on its own.

    Returns:
        [S + 1] int32, cumulative real lengths; [S + 1] int32, cumulative padded lengths: first row of each
        sub-sequence, then T.
    """
    padded_S = alignment.padded(lengths_S)
    padded_S[-1] += -int(padded_S.sum()) % alignment.total_multiple
    real, padded = (np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32) for sizes in (lengths_S, padded_S))
    return real, padded


def cp_rows(cu_seqlens_padded: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Return the rows of the pack on one context-parallel rank, [T / cp] int64, in the rank's order.

    `cu_seqlens_padded` [S + 1] is the first row of each sub-sequence, then T. Each padded sub-sequence is cut into 2 *
    cp equal chunks. Rank r has chunk r and then chunk 2 * cp - 1 - r, so all ranks have the same work under a causal
    mask.

    Raises:
        ContractError: a padded sub-sequence is not divisible by 2 * cp.

    Source:
        Megatron-Core 0.19.2, core/utils.py `_get_batch_on_this_cp_rank_per_sequence_balancing` (one sequence), and per
        document Transformer Engine's `thd_get_partitioned_indices`.
    """
    starts_S = np.asarray(cu_seqlens_padded[:-1], np.int64)
    padded_S = np.diff(np.asarray(cu_seqlens_padded, np.int64))
    if cp == 1:
        return np.arange(int(cu_seqlens_padded[-1]))
    if (padded_S % (2 * cp)).any():
        bad = int((padded_S % (2 * cp) != 0).argmax())
        raise ContractError(
            f"sub-sequence {bad} has {int(padded_S[bad])} padded tokens, which 2 * cp = {2 * cp} does not divide"
        )
    chunk_S = padded_S // (2 * cp)
    local_S = 2 * chunk_S
    local_T = np.arange(int(local_S.sum())) - np.repeat(np.cumsum(local_S) - local_S, local_S)
    chunk_T = np.repeat(chunk_S, local_S)
    behind_T = local_T >= chunk_T
    begin_T = np.where(behind_T, (2 * cp - 2 - cp_rank) * chunk_T, cp_rank * chunk_T)
    return np.repeat(starts_S, local_S) + begin_T + local_T


def sp_slice(num_rows: int, tp: int, tp_rank: int) -> slice:
    """Return the rows, among those of a context-parallel rank, of one tensor-parallel rank between layers.

    Raises:
        ContractError: tp does not divide the rows.

    Source:
        Megatron-Core 0.19.2, core/tensor_parallel/mappings.py `_split_along_first_dim`: contiguous equal slices.
    """
    if num_rows % tp:
        raise ContractError(f"{num_rows} rows do not divide over tp = {tp} for sequence parallelism")
    size = num_rows // tp
    return slice(tp_rank * size, (tp_rank + 1) * size)
