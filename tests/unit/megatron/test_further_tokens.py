"""Weights of micro-batches in the loss of a layer for a further token (MTP)."""

from __future__ import annotations

import numpy as np
import pytest

from verifier.data.rollout import make_rollout
from verifier.megatron.pack import pack
from verifier.megatron.step_megatron import _share_of_further
from verifier.megatron.token_layout import Alignment


def test_means_of_micro_batches_add_up_to_the_mean_over_the_step():
    """Of a prompt of one token the second token is in the loss, and is no further token of any."""
    rollouts = [make_rollout(f"r{size}", np.array([1]), np.arange(size)) for size in (2, 5, 11)]
    further = 18 / 15  # tokens in the loss, over those of them that are further tokens
    shares = [_share_of_further(pack([rollout], Alignment()), further) for rollout in rollouts]
    weights = [share * tokens / 18 for share, tokens in zip(shares, (2, 5, 11), strict=True)]  # as Megatron weighs them
    assert weights == pytest.approx([1 / 15, 4 / 15, 10 / 15])
    assert _share_of_further(pack([], Alignment()), further) == 0
