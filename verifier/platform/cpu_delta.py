"""Gated delta nets on the host: megatron-core's layer with flash-linear-attention's kernels in plain PyTorch.

The layer, its parameters and its parallelism are megatron-core's. Replaced are the convolution, the L2 norm and the
gated delta rule, which take packed sequences each by itself.

Source:
    Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", equation 10, and section 3.3 with one chunk;
    flash-linear-attention 0.4, modules/convolution.py (`causal_conv1d`), modules/l2norm.py (`l2norm`) and
    ops/gated_delta_rule/chunk.py (`chunk_gated_delta_rule`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from verifier.errors import UsageError
from verifier.platform.patch import Patch

LAYER = "megatron.core.ssm.gated_delta_net"


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Convolve each sequence of [batch, rows, channels] with its past, in float64, and apply SiLU.

    The batch is 1 if packed; `weight` is [channels, width] and `bias` [channels]. `cu_seqlens` [sequences + 1] are the
    boundaries of packed sequences, before each of which rows are 0; None for one sequence. The result has the shape and
    dtype of `x`, and comes with no state.

    Raises:
        UsageError: another activation, or a state.
    """
    if activation not in ("silu", "swish") or initial_state is not None or output_final_state:
        raise UsageError(f"the reference convolution knows silu without states, not {activation}")
    exact, width = weight.double()[:, None], weight.shape[1]
    parts = []
    for part in _sequences(x.double(), cu_seqlens):
        padded = functional.pad(part.transpose(1, 2), (width - 1, 0))
        convolved = functional.conv1d(padded, exact, None if bias is None else bias.double(), groups=len(weight))
        parts.append(functional.silu(convolved).transpose(1, 2))
    return torch.cat(parts, dim=1).to(x.dtype), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide [..., width] by its length over the last dim, in float64; `eps` is added to the sum of squares."""
    exact = x.double()
    return (exact * (exact.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule of packed sequences, each by itself and from an empty state, in float64.

    `q` and `k` are [batch, rows, heads, key width], the batch 1 if packed, `v` and the result, which has its dtype and
    comes with no state, [batch, rows, heads, value width]. `g`, the logarithm of the decay, at most 0, and `beta`, the
    rate of writing within 0 and 1, are [batch, rows, heads]. `scale` is the factor of `q`; None for the root of 1 / key
    width. `cu_seqlens` [sequences + 1] are the boundaries of packed sequences; None for one sequence.

    Raises:
        UsageError: a state, or a norm.
    """
    if initial_state is not None or output_final_state or use_qk_l2norm_in_kernel:
        raise UsageError("the reference gated delta rule knows neither states nor norms")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    each = [_sequences(item.double(), cu_seqlens) for item in (q, k, v, g, beta)]
    parts = [_delta_rule(*sequence, scale=factor) for sequence in zip(*each, strict=True)]
    return torch.cat(parts, dim=1).to(v.dtype), None


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float) -> Tensor:
    """Compute one sequence by attention-like products: [batch, rows, heads, width], gates [batch, rows, heads].

    The state after row t is S_t = exp(g_t) (I - beta_t k_t k_t') S_t-1 + beta_t k_t v_t', the output S_t' q_t. Row t
    writes w_t = beta_t (v_t - the sum over s < t of exp(g_s+1 + ... + g_t) (k_t . k_s) w_s): a triangular system. The
    output is the sum over s <= t of exp(g_s+1 + ... + g_t) (q_t . k_s) w_s.
    """
    q, k, v, g, beta = (item.transpose(1, 2) for item in (q, k, v, g, beta))
    faded, rows = g.cumsum(-1), g.shape[-1]
    later = torch.ones(rows, rows, dtype=torch.bool, device=g.device).triu(1)
    decay = (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -torch.inf).exp()
    rate = beta[..., None]
    written = torch.linalg.solve_triangular(
        rate * (k @ k.mT) * decay, rate * v, upper=False, unitriangular=True
    )  # without the diagonal
    return (scale * ((q @ k.mT) * decay) @ written).transpose(1, 2)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    return (x,) if cu_seqlens is None else x.split(cu_seqlens.diff().tolist(), dim=1)


def delta_patches() -> list[Patch]:
    """Return the patches that put the replacements where megatron-core's layer looks up flash-linear-attention."""
    kernels = (causal_conv1d, chunk_gated_delta_rule)
    return [
        Patch(f"{LAYER}.common:HAVE_FLA", True),
        Patch(f"{LAYER}.common:l2norm", l2norm),
        *(Patch(f"{LAYER}.{module}:{item.__name__}", item) for module in ("common", "gdn") for item in kernels),
    ]
