"""Causal attention and rotary embeddings on the host: packed and plain, grouped queries, context parallelism, windows.

Every sub-sequence is computed from its own rows only. So the contents of other sub-sequences and of padding, NaN
included, cannot change a bit of it. Padding rows become zeros. Layouts are THD if packed and SBHD if not.
Rotary embeddings take all sequences of a packed micro-batch at once, bitwise as megatron-core's loop over sequences.

Shapes: T rows of this rank, H query heads, G key-value heads, D width of a head.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor
from torch.nn import Parameter

from verifier.errors import UsageError
from verifier.platform.cpu_mamba import zigzag_positions


class TEDotProductAttention(torch.nn.Module):
    """Softmax attention in float32 with the interface of megatron-core's wrapper of the same name.

    A learnable softmax has a parameter `softmax_offset`, [H], the score of a sink of each head: a row that every row
    attends to and that has no value.

    Raises:
        UsageError: cross-attention, a softmax with a fixed offset, or dropout, which are not implemented.
    """

    softcap: float | None = None
    """Bound of the scores, to which they are bent by a hyperbolic tangent; None for scores as they are."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for what, used in (
            (f"{config.softmax_type} softmax", config.softmax_type not in ("vanilla", "learnable")),
            (f"the attention dropout of {dropout:g} that megatron-bridge's provider has", dropout != 0.0),
            (f"{attention_type}-attention", attention_type != "self"),
        ):
            if used:
                raise UsageError(f"the cpu tier's reference attention does not compute {what}: use the gpu tier")
        self.config = config
        self.softmax_scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.tp_group = parallel_state.get_tensor_model_parallel_group() if pg_collection is None else pg_collection.tp
        heads = divide(config.num_attention_heads, self.tp_group.size())
        sinks = Parameter(torch.zeros(heads, dtype=config.params_dtype)) if config.softmax_type == "learnable" else None
        self.register_parameter("softmax_offset", sinks)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.rows_before = config.window_size[0] if windowed and config.window_size[0] >= 0 else None
        """Number of earlier rows that a row attends to; None for all."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attend within each sub-sequence; [T, H * D] packed, or [rows, batch, H * D], in the query's dtype.

        `query` is [T, H, D] packed, or [rows, batch, H, D], in zigzag order under context parallelism; `key` has G
        heads, and so has `value`, with its own width. `packed_seq_params` has the cumulative lengths of the whole
        packed batch, over all context-parallel ranks, the same for queries and keys; what repeats them, such as a
        greatest length, is for kernels (LGP008).

        Raises:
            UsageError: a mask other than causal, an attention bias, or queries and keys of different lengths.
        """
        if attention_mask is not None or num_splits is not None:
            raise UsageError("the cpu tier's reference attention reads no mask and splits nothing: use the gpu tier")
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) or attention_bias is not None:
            raise UsageError(f"the cpu tier's reference attention is causal without bias, not {attn_mask_type.name}")
        if packed_seq_params is not None:
            ends, padded_ends = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
            _require_same(ends, packed_seq_params.cu_seqlens_kv)
            _require_same(padded_ends, packed_seq_params.cu_seqlens_kv_padded)
            lengths = ends.diff().tolist()
            padded = lengths if padded_ends is None else padded_ends.diff().tolist()
            return self._attend_all(query, key, value, lengths, padded).flatten(-2)
        whole = [query.shape[0] * self.cp_group.size()]
        batch = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
        return torch.stack([self._attend_all(*column, whole, whole) for column in batch], dim=1).flatten(-2)

    def _attend_all(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], padded: list[int]) -> Tensor:
        """Attend within each sub-sequence, those of one length together; padding and rows after the last are zeros."""
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        num_rows = query.shape[0]
        key = gather_from_sequence_parallel_region(key, tensor_parallel_output_grad=True, group=self.cp_group)
        value = gather_from_sequence_parallel_region(value, tensor_parallel_output_grad=True, group=self.cp_group)
        first_rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        begin = 0
        for length, padded_length in zip(lengths, padded, strict=True):
            first_rows[length, padded_length].append(begin)
            begin += padded_length // cp_size
        places, parts = [], []
        for (length, padded_length), begins in first_rows.items():
            home = zigzag_positions(padded_length, cp_size, cp_rank)
            real = home < length
            mine = torch.stack([torch.arange(first, first + len(home))[real] for first in begins])
            order = torch.stack([_natural_order(padded_length, cp_size, at, num_rows)[:length] for at in begins])
            attended = _causal(
                query[mine], key[order], value[order], home[real], self.softmax_scale, self.rows_before, self.softcap,
                self.softmax_offset,
            )  # fmt: skip
            places.append(mine.flatten())
            parts.append(attended.flatten(0, 1))
        rows = query.new_zeros(num_rows, query.shape[1], value.shape[-1])
        return rows.index_put((torch.cat(places),), torch.cat(parts))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Place this rank's sinks among those of all heads; nothing without sinks.

        Source:
            megatron-core 0.19.2, core/extensions/transformer_engine.py, `TEDotProductAttention.sharded_state_dict`.
        """
        held = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            held, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip


def _require_same(queries: Tensor | None, keys: Tensor | None) -> None:
    same = queries is keys if queries is None or keys is None else queries is keys or torch.equal(queries, keys)
    if not same:
        raise UsageError("the cpu tier's reference attention takes queries and keys of one length: use the gpu tier")


def _natural_order(length: int, cp_size: int, begin: int, num_rows: int) -> Tensor:
    """Return the index of each position of a sub-sequence in the gathered, rank-major rows, [length] int64."""
    order = torch.empty(length, dtype=torch.int64)
    for rank in range(cp_size):
        order[zigzag_positions(length, cp_size, rank)] = rank * num_rows + begin + torch.arange(length // cp_size)
    return order


def _causal(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float | None, rows_before: int | None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of rows at `positions` [rows] over whole sub-sequences, in float32: [S, rows, H, width of a value].

    `query` is [S, rows, H, D], of sub-sequences of one length, and `key` [S, length, G, D]. `scale` is the factor of
    the scores, None the inverse root of D; `rows_before` the number of earlier rows that a row attends to, None for
    all; `softcap` the bound of the scores, None for none; `sinks` [H] the score of a further row without a value.
    """
    num_heads, width = query.shape[-2:]
    repeats = num_heads // key.shape[-2]
    q = query.float().transpose(1, 2)
    k, v = (side.float().repeat_interleave(repeats, dim=2).transpose(1, 2) for side in (key, value))
    scores = torch.matmul(q, k.transpose(2, 3)) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = positions[:, None] - torch.arange(key.shape[1])
    unseen = behind < 0 if rows_before is None else (behind < 0) | (behind > rows_before)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[1]]
    return torch.matmul(weights, v).transpose(1, 2).to(query.dtype)


class Gemma2FlexDotProductAttention(TEDotProductAttention):
    """Gemma 2's attention: scores bent to a bound, a scale of its own, and a window in every other layer.

    Upstream's takes no packed sequences, on a GPU either.

    Source:
        megatron-bridge 0.6.2, models/gemma/gemma2_provider.py, `Gemma2DotProductAttention`.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        options["softmax_scale"] = config.query_pre_attn_scalar**-0.5
        super().__init__(config, layer_number, attn_mask_type, attention_type, **options)
        self.softcap = config.attn_logit_softcapping
        if layer_number % 2 == 0:
            self.rows_before = None


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Embed t [length, batch, heads, width] by freqs [length, 1, 1, width]."""
    del transpose_output_memory
    return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
) -> Tensor:
    """Embed t [rows, heads, width], packed sequences or one context-parallel rank's two chunks of each.

    Args:
        t: rows of this rank.
        cu_seqlens: [sequences + 1], cumulative padded lengths of the whole sequences.
        freqs: [at least the longest length, 1, 1, width], angles by position.
        cp_size: number of context-parallel ranks.
        cp_rank: this one.
        interleaved: pairs of a rotation are neighbours, and not halves.

    Source:
        megatron-core 0.19.2, core/models/common/embeddings/rope_utils.py, `_apply_rotary_pos_emb_thd`.
    """
    begins = cu_seqlens.long() // cp_size
    lengths = begins.diff()
    position = torch.arange(len(t), device=t.device) - torch.repeat_interleave(begins[:-1], lengths)
    if cp_size > 1:
        chunk = torch.repeat_interleave(lengths // 2, lengths)
        first, last = cp_rank * chunk, (2 * cp_size - 2 - cp_rank) * chunk  # of a row in the second chunk, less its own
        position += torch.where(position < chunk, first, last)
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs[position], rotary_interleaved=interleaved
    ).squeeze(1)
