"""Transformer Engine's rotary embeddings in plain PyTorch: all sequences of a packed micro-batch at once.

The values are bitwise those of megatron-core's own loop over sequences.
"""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


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
