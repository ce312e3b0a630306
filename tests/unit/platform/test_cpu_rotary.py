"""The CPU tier's rotary embeddings against megatron-core's own loop over packed sequences, bitwise."""

from __future__ import annotations

import pytest
import torch

LENGTHS = (8, 24, 4, 12, 4)


class Group:
    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_loop(cp_size, cp_rank, interleaved, dtype):
    from megatron.core.models.common.embeddings import rope_utils

    from verifier.platform.cpu_attention import fused_apply_rotary_pos_emb_thd

    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    rows = torch.randn(sum(LENGTHS) // cp_size, 3, 16, generator=generator).to(dtype)
    angles = torch.outer(torch.arange(40.0), 10_000 ** -(torch.arange(0, 12, 2) / 12))  # of 12 of 16 values
    freqs = torch.cat([angles, angles], -1)[:, None, None, :]
    weights = torch.randn(rows.shape, generator=generator).to(dtype)
    found = []
    for kernel in (
        lambda t: rope_utils._apply_rotary_pos_emb_thd(
            t, ends, freqs, rotary_interleaved=interleaved, cp_group=Group(cp_size, cp_rank)
        ),
        lambda t: fused_apply_rotary_pos_emb_thd(
            t, ends, freqs, cp_size=cp_size, cp_rank=cp_rank, interleaved=interleaved
        ),
    ):
        leaf = rows.clone().requires_grad_()
        values = kernel(leaf)
        (values * weights).sum().backward()
        found.append((values.detach(), leaf.grad))
    (looped, looped_gradient), (fused, fused_gradient) = found
    assert torch.equal(fused, looped)
    assert torch.equal(fused_gradient, looped_gradient)
