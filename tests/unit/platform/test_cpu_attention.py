"""The CPU tier's attention with sinks, and with scores bent to a bound, against transformers' own.

Both compute in float32; what they may differ by from transformers in float64 is what transformers' own rounding makes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

LENGTH, HEADS, GROUPS, WIDTH, WINDOW, SCALE = 24, 4, 2, 8, 6, 0.3


def attended(attend, dtype=torch.float32):
    """Values of an attention over seeded rows, and the gradients of rows and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, LENGTH, HEADS, WIDTH), *[(1, LENGTH, GROUPS, WIDTH)] * 2, (HEADS,))
    leaves = [(3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]
    values = attend(*leaves)
    (values * torch.randn(values.shape, generator=generator).to(dtype)).sum().backward()
    return [values.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def by_transformers(module, forward, **options):
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = torch.zeros(LENGTH, LENGTH).masked_fill((behind < 0) | (behind > WINDOW), float("-inf"))[None, None]

    def attend(query, key, value, sinks):
        owner = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, training=False, sinks=sinks)
        rows = [rows.transpose(1, 2) for rows in (query, key, value)]
        return getattr(module, forward)(owner, *rows, mask, scaling=SCALE, **options)[0]

    return attend


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
@pytest.mark.parametrize("bent", [False, True], ids=["sinks", "softcap"])
def test_values_and_gradients_are_those_of_transformers(bent):
    from verifier.platform.cpu_attention import _causal

    softcap = 5.0 if bent else None
    mine = attended(
        lambda query, key, value, sinks: _causal(
            query, key, value, torch.arange(LENGTH), SCALE, WINDOW, softcap, None if bent else sinks
        )
    )
    options = {"softcap": softcap} if bent else {}
    theirs = by_transformers(modeling_gemma2 if bent else modeling_gpt_oss, "eager_attention_forward", **options)
    exact, rounded = attended(theirs, torch.float64), attended(theirs)
    assert len(mine) == len(exact) == (4 if bent else 5)
    for actual, expected, other in zip(mine, exact, rounded, strict=True):
        assert actual.norm() > 0.1
        assert (actual - expected).abs().max() < 4 * (other - expected).abs().max()
