"""Attention of transformers for some queries at a time: the scores of all queries are never held together."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

SLICED = "eager_in_slices"
"""Name of this attention in transformers' registries."""
SCORES_BYTES = 2**29
"""Most bytes of scores, in float32 or more, that are computed at once, unless they are of one query. A softmax and its
gradient hold some five times as many. The same on every device, so that a run of the same data has the same bits."""
ALIGNED = 64
"""Keys to a multiple of which a slice begins and ends, so that the lanes of a vectorised sum have the same terms."""
_Mask = Tensor | Callable[[int, int], Tensor] | None
"""[batch, 1, queries, keys] that is added to scores; or what makes that of some queries, by the first and how many."""


def attend_in_slices(model: PreTrainedModel) -> None:
    """Have a model whose attention goes by transformers' interface attend in slices where it has many scores.

    A model that looks at the name of its implementation, such as DeepSeek-V3.2, attends as before.
    """
    code = inspect.getsource(sys.modules[type(model).__module__])
    if "ALL_ATTENTION_FUNCTIONS.get_interface(" in code and '"eager"' not in code:
        model.set_attn_implementation(SLICED)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Mask, **options: Any
) -> tuple[Tensor, None]:
    """Result of the module's own `eager_attention_forward`, [batch, queries, heads, width], without its weights.

    A query's row depends on no other query, so slices have the rows of the whole. For gradients each is computed again.
    """
    eager = sys.modules[type(module).__module__].eager_attention_forward
    rows, num_queries = query.shape[0] * query.shape[1], query.shape[-2]
    step = max(1, SCORES_BYTES // (rows * key.shape[-2] * max(query.dtype.itemsize, 4)))
    slices = step < num_queries

    def some(query: Tensor, key: Tensor, value: Tensor, begin: int) -> Tensor:
        mask = attention_mask
        if mask is not None:
            count = query.shape[-2]
            mask = mask[..., begin : begin + count, :] if isinstance(mask, Tensor) else mask(begin, count)
            key, value, mask = _attended(key, value, mask) if slices else (key, value, mask)
        return eager(module, query, key, value, mask, **options)[0]

    if not slices:
        return some(query, key, value, 0), None
    again = partial(checkpoint, some, use_reentrant=False, preserve_rng_state=False)
    run = again if torch.is_grad_enabled() else some
    parts = [run(part, key, value, at * step) for at, part in enumerate(query.split(step, dim=-2))]
    return torch.cat(parts, dim=1), None


def _attended(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys from the first to the last that some query attends to; all where a query attends to none."""
    seen = mask > torch.finfo(mask.dtype).min
    if not bool(seen.any(dim=-1).all()):
        return key, value, mask
    places = seen.any(dim=-2).flatten(0, -2).any(dim=0).nonzero()
    kept = slice(int(places[0]) // ALIGNED * ALIGNED, (int(places[-1]) // ALIGNED + 1) * ALIGNED)
    return key[..., kept, :], value[..., kept, :], mask[..., kept]


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> _Mask:  # fmt: skip
    """`eager_mask`, of some queries at a time where it is large."""

    def of(begin: int, count: int) -> Tensor:
        return eager_mask(batch_size, count, kv_length, q_offset + begin, dtype=dtype, **options)

    return of if batch_size * q_length * kv_length * dtype.itemsize > SCORES_BYTES // 8 else of(0, q_length)


AttentionInterface.register(SLICED, _attend)
AttentionMaskInterface.register(SLICED, _mask)
