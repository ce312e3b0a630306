"""Matrix products of bfloat16 on a processor that has no instructions for them."""

from __future__ import annotations

import functools
import warnings

import torch


@functools.cache
def multiply_bfloat16_in_float32() -> None:
    """Make products of bfloat16 tensors on the CPU those of the same numbers in float32, rounded once.

    That is what a kernel for bfloat16 computes: it adds in float32. Where the processor has neither AVX-512 nor AMX,
    torch 2.11 multiplies [300, 576] by [576, 1536] at 1.3 GFLOP/s on two cores, and at 85 GFLOP/s so. Other processors
    keep torch's kernels. Nothing is computed otherwise in other dtypes.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
        for name, kernel in {"mm": _mm, "bmm": _bmm, "addmm": _addmm, "baddbmm": _baddbmm}.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    _held.append(library)


_held: list[torch.library.Library] = []
"""Libraries whose kernels stay registered."""


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == torch.bfloat16:
        return torch.mm(left.float(), right.float()).bfloat16()
    return torch.ops.aten.mm.out(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype == torch.bfloat16:
        return torch.bmm(left.float(), right.float()).bfloat16()
    return torch.ops.aten.bmm.out(left, right, out=left.new_empty(*left.shape[:2], right.shape[2]))


def _addmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if left.dtype == torch.bfloat16:
        parts = (part.float() for part in (added, left, right))
        return torch.addmm(*parts, beta=beta, alpha=alpha).bfloat16()
    out = left.new_empty(left.shape[0], right.shape[1])
    return torch.ops.aten.addmm.out(added, left, right, beta=beta, alpha=alpha, out=out)


def _baddbmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if left.dtype == torch.bfloat16:
        parts = (part.float() for part in (added, left, right))
        return torch.baddbmm(*parts, beta=beta, alpha=alpha).bfloat16()
    out = left.new_empty(*left.shape[:2], right.shape[2])
    return torch.ops.aten.baddbmm.out(added, left, right, beta=beta, alpha=alpha, out=out)
