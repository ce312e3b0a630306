"""A scale of attention that is the head's own counts as unstated, however its root was taken."""

from __future__ import annotations

import math

import pytest

from verifier.stages.logprob.checks_stated import softmax_scale, trainer_softmax_scale


@pytest.mark.parametrize("width", [32, 80, 96, 128, 256])
def test_the_heads_own_scale_by_either_root(width: int) -> None:
    for scale in (1.0 / math.sqrt(width), width**-0.5):
        assert trainer_softmax_scale({"softmax_scale": scale, "kv_channels": width}) is None


def test_another_scale_is_stated() -> None:
    assert trainer_softmax_scale({"softmax_scale": 0.0625, "kv_channels": 128}) == 0.0625
    assert trainer_softmax_scale({"softmax_scale": None, "kv_channels": 128}) is None


@pytest.mark.parametrize("scalar", [144, 168, 224])  # Gemma 2 27B, Gemma 3 27B, the default of the bridge's Gemma 2
def test_a_scale_is_told_by_the_number_under_the_root(scalar: int) -> None:
    fields = {"softmax_scale": None, "query_pre_attn_scalar": scalar, "kv_channels": 128}
    config = {"query_pre_attn_scalar": scalar, "head_dim": 128}
    assert trainer_softmax_scale(fields) == softmax_scale(config) == scalar**-0.5
    assert trainer_softmax_scale({"softmax_scale": 1 / math.sqrt(scalar), "kv_channels": 128}) == scalar**-0.5
    assert trainer_softmax_scale({**fields, "query_pre_attn_scalar": 128}) is None
