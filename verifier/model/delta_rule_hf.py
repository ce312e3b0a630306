"""The gated delta rule of the oracle: token by token, as it is defined."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_SEGMENT = 32
"""Tokens whose states are kept at once for gradients; before them one state per segment is."""


def scan_by_token(model: nn.Module) -> None:
    """Have gated delta nets compute their recurrence, in the model's dtype or in float32 if that has less.

    transformers computes in chunks of 64 tokens and in float32, in a float64 model too.
    """
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = gated_delta_rule


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute S = e^g S + beta k (v - k' e^g S)' and S' q / sqrt(width) for each token of each sequence.

    Args:
        query: [batch, tokens, heads, key width].
        key: [batch, tokens, heads, key width].
        value: [batch, tokens, heads, value width].
        g: [batch, tokens, heads], logarithm of the decay.
        beta: [batch, tokens, heads], rate of writing.
        initial_state: [batch, heads, key width, value width]; None for zeros.
        output_final_state: True to return the state after the last token.
        use_qk_l2norm_in_kernel: True to divide query and key by the root of their sum of squares and 1e-6.
        cu_seqlens: None, as sequences are not packed.

    Returns:
        [batch, tokens, heads, value width] in the query's dtype, and the state, or None.

    Source:
        Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", equation 10; arguments of transformers 5.12
        `torch_chunk_gated_delta_rule`.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, decay, rate = (item.to(dtype) for item in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (item / (item.square().sum(-1, keepdim=True) + 1e-6).sqrt() for item in (q, k))
    parts = (q[..., None, :] / q.shape[-1] ** 0.5, k[..., None, :], v[..., None, :], decay.exp(), rate)
    state = k.new_zeros(len(k), *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    run = partial(checkpoint, _segment, use_reentrant=False, preserve_rng_state=False)
    found = []
    for segment in zip(*(item.split(_SEGMENT, dim=1) for item in parts), strict=True):
        rows, state = run(state, *segment) if torch.is_grad_enabled() else _segment(state, *segment)
        found.append(rows)
    return torch.cat(found, dim=1).to(query.dtype), state if output_final_state else None


def _segment(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Go on from [batch, heads, key width, value width]; rows are [batch, tokens, heads, 1, width], gates without."""
    rows = []
    for now in range(q.shape[1]):
        state = decay[:, now, :, None, None] * state
        written = rate[:, now, :, None, None] * (v[:, now] - k[:, now] @ state)
        state = state + k[:, now].mT * written
        rows.append(q[:, now] @ state)
    return torch.stack(rows, dim=1).squeeze(-2), state
