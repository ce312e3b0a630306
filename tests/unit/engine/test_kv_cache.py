"""Keys and values of an engine: bytes, from config.json, and what it keeps of them.

What this does not exercise: vLLM's own account of its blocks (tests/dist/test_train_clean.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifier.config import EngineOptions
from verifier.engine.api import EngineConfig, Sampling
from verifier.engine.kv_cache import bytes_per_token, cache_bytes, holds_all, kept_keys, most_on_gpu
from verifier.errors import UsageError
from verifier.model.named import config_of

LARGE = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128}  # fmt: skip
"""Qwen3-30B-A3B: 96 KiB a token in bf16."""
TP1, TP2 = EngineOptions(), EngineOptions(tp=2)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "dtype", "engine", "expected"),
    [
        (LARGE, "bfloat16", TP1, 48 * 2 * 4 * 128 * 2),
        (LARGE, "float32", TP2, 48 * 2 * 2 * 128 * 4),
        (LARGE, "bfloat16", EngineOptions(tp=8), 48 * 2 * 1 * 128 * 2),
        (LARGE, "bfloat16", EngineOptions(pp=5), 10 * 2 * 4 * 128 * 2),
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}, "bfloat16", TP1, 2 * 2 * 64 * 2),
        ({**LARGE, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "bfloat16", EngineOptions(tp=4), 48 * 576 * 2),
        ({**LARGE, "mamba_num_heads": 8}, "bfloat16", TP1, None),
        ({**LARGE, "linear_num_value_heads": 8}, "bfloat16", TP1, None),
        ({}, "bfloat16", TP1, None),
    ],
)
def test_bytes_of_a_token(sizes, dtype, engine, expected):
    assert bytes_per_token(sizes, dtype, engine) == expected


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [(128, 2, 128 * MIB), (1024, 4, 384 * MIB), (1024, 512, 1024 * MIB), (32768, 8, (32768 + 128) * 96 * 1024)],
)
def test_a_cache_has_room_for_a_step_or_at_least_one_sequence(length, count, expected):
    assert cache_bytes(None, LARGE, dtype="bfloat16", engine=TP1, length=length, count=count) == expected


def test_a_cache_on_a_gpu_is_a_share_of_what_the_weights_leave():
    most = most_on_gpu(0.3, 80 << 30, 60 << 30, TP2)
    assert most == 0.3 * (50 << 30)
    asked = {"dtype": "bfloat16", "engine": TP1, "length": 1024, "count": 512}
    assert cache_bytes(None, LARGE, **asked, most=most) == 15 << 30
    assert cache_bytes(None, LARGE, **asked, most=most_on_gpu(0.8, 141 << 30, 60 << 30, TP1)) == 48 << 30
    assert most_on_gpu(0.3, 8 << 30, 60 << 30, TP1) == 0.0


def test_small_models_keep_the_least_cache():
    assert cache_bytes(None, config_of("tiny:add"), dtype="float32", engine=TP1, length=80, count=64) == 128 * MIB


def test_a_cache_below_one_sequence_is_refused():
    asked = {"dtype": "bfloat16", "engine": TP1, "length": 32768, "count": 8}
    assert cache_bytes(3.0, LARGE, **asked) == 3 << 30
    with pytest.raises(UsageError) as refusal:
        cache_bytes(2.5, LARGE, **asked)
    assert str(refusal.value) == (
        "engine.kv_cache_gib is 2.5, and one sequence of 32,768 tokens takes 3 GiB of an engine rank: raise it, or "
        "leave it out"
    )
    assert cache_bytes(2.5, {**LARGE, "sliding_window": 4096}, **asked) == 5 << 29
    assert cache_bytes(2.5, {**LARGE, "layer_types": ["linear_attention", "full_attention"]}, **asked) == 5 << 29


@pytest.mark.parametrize(
    ("tokens", "length", "cuda", "expected"),
    [
        (0, 512, True, None), (0, 512, False, 640), (0, 1024, False, 1024), (100_000, 512, False, 100_000),
        (100_000, 512, True, 8192), (100_000, 20_000, True, 20_000), (640, 512, True, 640),
        (640, 1024, False, 1024),
    ],
)  # fmt: skip
def test_prompts_of_a_step_are_chunked_on_a_gpu(tokens, length, cuda, expected):
    config = EngineConfig(checkpoint="anywhere", max_model_len=length, max_batch_tokens=tokens)
    assert config.pass_tokens(cuda=cuda) == expected


def test_an_engine_tells_its_cached_blocks_and_the_keys_of_requests_that_run():
    running = {"a": SimpleNamespace(num_computed_tokens=3), "b": SimpleNamespace(num_computed_tokens=4)}
    pool = SimpleNamespace(cached_block_hash_to_block={1: "block", 2: "block"})
    scheduler = SimpleNamespace(requests=running, kv_cache_manager=SimpleNamespace(block_pool=pool))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    assert kept_keys(SimpleNamespace(_llm=SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))) == [(2, 7)]
    assert kept_keys(SimpleNamespace()) == [(0, 0)]


@pytest.mark.parametrize(("num_blocks", "holds"), [(9, True), (8, False), (0, False)])
def test_a_cache_that_may_preempt_a_request_is_told(num_blocks, holds):
    """Two samples of 3 blocks of 16 tokens each, and one of 2; a block is vLLM's own."""
    prompts, asked = [(1,) * 33, (1,) * 16], [Sampling(n=2, max_tokens=15, seed=0), Sampling(max_tokens=1, seed=0)]
    assert holds_all(prompts, asked, num_blocks, 16) is holds
