"""State-space layers on the host: megatron-core's Mamba mixer with mamba-ssm's kernels in plain PyTorch.

The mixer, its parameters and its parallelism are megatron-core's. Replaced are the fused kernel of a training step, the
gated norm, and the order of rows over context-parallel ranks.

Source:
    Dao and Gu 2024, "Transformers are SSMs", section 6 (state space duality in its quadratic form);
    mamba-ssm 2.3.2, ops/triton/ssd_combined.py (`mamba_split_conv1d_scan_combined`) and layernorm_gated.py (`RMSNorm`).
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from verifier.errors import UsageError
from verifier.platform.patch import Patch

MIXER = "megatron.core.ssm.mamba_mixer"
SHARDED = "megatron.core.ssm.mamba_context_parallel"


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    *,
    D: Tensor,
    chunk_size: int,
    activation: str,
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Compute convolution, scan and gate of packed sequences, each by itself, in float64.

    `zxbcdt` is [batch, rows, 2 * inner + 2 * groups * state + heads], its batch 1 if packed, and the result [batch,
    rows, inner] in its dtype. `conv1d_weight` is [inner + 2 * groups * state, width] and its bias without the width;
    `dt_bias`, `A`, below 0, and `D`, the factor of the input that bypasses the state, are [heads]; `headdim` is inner /
    heads. `ngroups` groups of heads share B and C. `seq_idx` [1, rows] is the index of each row's sequence; None for
    one sequence. `chunk_size` and `norm_before_gate` are ignored: nothing is fused, and the norm is not computed here.

    Raises:
        UsageError: another activation.
    """
    if activation != "silu":
        raise UsageError(f"the reference state-space layer knows silu, not {activation}")
    if seq_idx is None:
        lengths = [zxbcdt.shape[1]]
    else:
        lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    widths = [A.numel() * headdim, conv1d_weight.shape[0], A.numel()]
    exact = [value.double() for value in (conv1d_weight, conv1d_bias, dt_bias, A, D)]
    parts = []
    for sequence in zxbcdt.double().split(lengths, dim=1):
        z_BLI, xbc_BLC, dt_BLH = sequence.split(widths, dim=-1)
        parts.append(_scan(z_BLI, xbc_BLC, dt_BLH, *exact, groups=ngroups))
    return torch.cat(parts, dim=1).to(zxbcdt.dtype)


def _scan(
    z_BLI: Tensor,
    xbc_BLC: Tensor,
    dt_BLH: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor,
    dt_bias_H: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    *,
    groups: int,
) -> Tensor:
    """Compute one sequence (L rows, H heads, I inner = H * P, C = I + 2 * groups * N) by attention-like products.

    Row t of the output is the sum over s <= t of exp(A * (dt_s+1 + ... + dt_t)) dt_s (C_t . B_s) x_s, plus D x_t.
    """
    batch, rows, inner = z_BLI.shape
    heads, width = A_H.numel(), weight_CW.shape[1]
    padded = functional.pad(xbc_BLC.transpose(1, 2), (width - 1, 0))
    convolved = functional.conv1d(padded, weight_CW[:, None], bias_C, groups=weight_CW.shape[0])
    convolved = functional.silu(convolved).transpose(1, 2)
    state = (weight_CW.shape[0] - inner) // 2
    x, B, C = convolved.split([inner, state, state], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    B, C = (part.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2) for part in (B, C))
    dt = functional.softplus(dt_BLH + dt_bias_H)
    faded_BHL = (dt * A_H).transpose(1, 2).cumsum(-1)
    later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
    decay = (faded_BHL[..., :, None] - faded_BHL[..., None, :]).masked_fill(later, -torch.inf).exp()
    weights = torch.einsum("blhn,bshn->bhls", C, B) * decay * dt.transpose(1, 2)[:, :, None]
    y = torch.einsum("bhls,bshp->blhp", weights, x) + D_H[:, None] * x
    return y.reshape(batch, rows, inner) * functional.silu(z_BLI)


class GroupedRMSNorm(torch.nn.Module):
    """RMSNorm over groups of the last dim, in float32, of an input that is already gated."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden]."""
        grouped = x.float().unflatten(-1, (-1, self.group_size))
        normed = functional.rms_norm(grouped, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint's description of the weight, which tensor-parallel ranks divide.

        Source:
            megatron-core 0.19.2, megatron/core/ssm/mamba_mixer.py, `ExtendedRMSNorm`.
        """
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        groups = {"tp_group": parallel_state.get_tensor_model_parallel_group(), **(metadata or {})}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=groups["tp_group"], dp_cp_group=groups.get("dp_cp_group"),
        )  # fmt: skip
        return found


def zigzag_positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of a padded sub-sequence on one context-parallel rank, [length / cp_size] int64, in order.

    A sub-sequence is cut into 2 * cp_size chunks, which divide it; rank r has chunk r and chunk 2 * cp_size - 1 - r.

    Source:
        megatron-core 0.19.2, megatron/core/utils.py, `get_batch_on_this_cp_rank`.
    """
    if cp_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[-1 - cp_rank]])


def packed_rows(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the rows of one context-parallel rank, [total_tokens / cp_size] int32, as Transformer Engine's extension.

    `cu_seqlens` are the padded boundaries, [sequences + 1]; the last is `total_tokens`, the rows of all ranks.
    """
    runs = itertools.pairwise(cu_seqlens.tolist())
    return torch.cat([begin + zigzag_positions(end - begin, cp_size, cp_rank) for begin, end in runs]).int()


def mixer_patches() -> list[Patch]:
    """Return the patches that put the replacements where megatron-core's mixer looks up mamba-ssm."""
    return [
        Patch(f"{MIXER}:HAVE_MAMBA_SSM", True),
        Patch(f"{MIXER}:mamba_split_conv1d_scan_combined", split_conv1d_scan),
        Patch(f"{MIXER}:ExtendedRMSNorm", GroupedRMSNorm),
        Patch(
            f"{MIXER}:_check_mamba_sequence_packing_support",
            lambda for_inference_not_training=True: (True, None),
            takes="for_inference_not_training",
        ),
        Patch(f"{SHARDED}:tex", SimpleNamespace(thd_get_partitioned_indices=packed_rows)),
        Patch(f"{SHARDED}:is_te_min_version", lambda version: True),
    ]
