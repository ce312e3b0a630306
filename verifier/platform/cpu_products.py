"""Matrix products of bfloat16 on a processor that has no instructions for them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

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
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            library.impl(name, _product(name), "CPU", allow_override=True)
    _held.append(library)


_held: list[torch.library.Library] = []
"""Libraries whose kernels stay registered."""


def _product(name: str) -> Callable[..., torch.Tensor]:
    """Kernel of a product whose last two tensors are the factors; torch's own where they are not of bfloat16."""
    exact, own = getattr(torch, name), getattr(torch.ops.aten, name).out

    def product(*parts: torch.Tensor, **weights: float) -> torch.Tensor:
        left, right = parts[-2:]
        if left.dtype == torch.bfloat16:
            return exact(*(part.float() for part in parts), **weights).bfloat16()
        return own(*parts, **weights, out=left.new_empty(*left.shape[:-1], right.shape[-1]))

    return product
