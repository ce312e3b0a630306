"""Refusals that need the model's sizes, the tier or encoded rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.data.examples import Example
from verifier.data.rollout import make_rollout
from verifier.errors import UsageError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.named import config_of
from verifier.model.tiny import write_tiny
from verifier.trainer.batches import SftPlan
from verifier.trainer.fitting import near_budget, require_budget, require_fit


def config(*words: str) -> TrainConfig:
    return load(TrainConfig, overrides=["model=tiny:add", "run=r", *words])[0]


def test_offload_is_refused_on_the_cpu_tier_alone():
    asked = config("megatron.optimizer_offload=0.5")
    require_fit(asked, config_of("tiny:add"), "cuda")
    with pytest.raises(UsageError, match=r"megatron.optimizer_offload is 0.5 and this machine has no GPU"):
        require_fit(asked, config_of("tiny:add"), "cpu")


def test_a_score_bias_is_updated_where_there_is_one():
    asked = config("megatron.moe_bias_update_rate=0.001")
    require_fit(asked, config_of("tiny:deepseek-v3"), "cpu")
    with pytest.raises(UsageError, match="no score bias"):
        require_fit(asked, config_of("tiny:qwen3-moe"), "cpu")


def test_rotary_embeddings_are_fused_where_the_kernel_fits():
    asked = config("megatron.rope_fusion=true")
    require_fit(asked, config_of("tiny:qwen3"), "cpu")
    require_fit(config(), config_of("tiny:deepseek-v3"), "cpu")
    with pytest.raises(UsageError, match=r"megatron.rope_fusion is true, but .* has latent attention"):
        require_fit(asked, config_of("tiny:deepseek-v3"), "cpu")


def test_a_budget_below_the_longest_rollout_is_refused_with_the_padding():
    rollouts = [make_rollout(f"r{size}", np.array([1]), np.arange(1, size)) for size in (5, 9, 7)]
    require_budget(config("batch.max_tokens=9"), rollouts)
    with pytest.raises(UsageError) as refusal:
        require_budget(config("batch.max_tokens=9", "mesh.tp=2"), rollouts)
    assert str(refusal.value) == (
        "batch.max_tokens is 9, below the 10 tokens of `r9`, padded to a multiple of 2: raise it, or shorten the "
        "example"
    )


def test_only_examples_that_may_be_too_long_are_encoded():
    examples = [Example(id=str(size), prompt="x" * size, messages=(), response="y", answer=None) for size in (10, 900)]
    assert [item.id for item in near_budget(config("batch.max_tokens=1000"), examples)] == ["900"]
    assert near_budget(config(), examples) == []


def test_a_budget_below_the_longest_sum_is_refused_before_ranks_start(tmp_path):
    """`<bos>37+85=####122<eos>` are 12 tokens."""
    checkpoint = open_checkpoint(write_tiny("add", tmp_path))
    words = ("data.num_examples=64", "evaluation.num_problems=8")
    SftPlan(config("batch.max_tokens=12", *words), checkpoint, lambda step: tmp_path)
    with pytest.raises(UsageError, match=r"batch.max_tokens is 11, below the 12 tokens of `arithmetic/"):
        SftPlan(config("batch.max_tokens=11", *words), checkpoint, lambda step: tmp_path)
