"""The engine's plain types and what they refuse."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
import pytest

from verifier.engine.api import (
    EngineConfig,
    Limits,
    Sampling,
    Shape,
    refuse_adapters,
    refuse_unsupported,
)
from verifier.engine.server import ONE_THREAD_BYTES, environment
from verifier.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "sglang"}, "--engine is `sglang`, it must be one of vllm, hf"),
        (
            {"kind": "vllm", "dtype": "float16"},
            "the engine cannot run in float16; choose one of float32, bfloat16",
        ),
        (
            {"kind": "hf", "tp": 2},
            "--engine hf has one rank, --engine-tp is 2: leave it out, or use --engine vllm",
        ),
        (
            {"kind": "hf", "pp": 2},
            "--engine hf has one rank, --engine-pp is 2: leave it out, or use --engine vllm",
        ),
        ({"kind": "vllm", "tp": 3}, "--engine-tp 3 is not one of 1, 2, 4, 8"),
        (
            {"kind": "vllm", "tp": 4, "ep": 2},
            "--engine-ep 2 and --engine-tp 4: vLLM divides experts over all ranks or over none, use the same size, or "
            "1",
        ),
    ],
)
def test_config_refuses(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(checkpoint="anywhere", **settings)
    assert str(caught.value) == sentence


def test_config_survives_json() -> None:
    config = EngineConfig(kind="vllm", checkpoint="anywhere", dtype="bfloat16", tp=2, max_model_len=64)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_sampling_survives_json() -> None:
    shape = Shape(top_k=3, bias=((5, 2.0),))
    one = Sampling(seed=7, max_tokens=4, stop=(1, 2), temperature=2.0, shape=shape, seeded=False)
    for sampling in (one, Sampling(seed=0, max_tokens=1, each=(one, one))):
        sent = json.dumps(asdict(sampling))
        assert json.dumps(asdict(msgspec.convert(json.loads(sent), Sampling))) == sent


def test_sampling_of_one_prompt() -> None:
    """Seeds follow each other, so that no two continuations share one; requests that differ are as they say."""
    alike = Sampling(seed=3, max_tokens=4, n=5)
    assert [alike.of(index).seed for index in range(3)] == [15, 20, 25]
    assert alike.of(2) == Sampling(seed=25, max_tokens=4, n=5)
    each = [Sampling(seed=1, max_tokens=2), Sampling(seed=9, max_tokens=3, temperature=0.0)]
    assert [Sampling(seed=0, max_tokens=4, each=each).of(index) for index in range(2)] == each


@pytest.mark.parametrize(
    ("sequences", "sentence"),
    [
        ([[1, 2], [1]], "sequence 1 has 1 tokens; the engine takes 2 to 4"),
        ([[1, 2, 3, 4, 5]], "sequence 0 has 5 tokens; the engine takes 2 to 4"),
        ([[1, 2], [3, 10]], "sequence 1 has token 10 at position 1, outside the vocabulary [0, 10)"),
        ([[-1, 2]], "sequence 0 has token -1 at position 0, outside the vocabulary [0, 10)"),
    ],
)
def test_sequences_are_refused_by_name(sequences: list[list[int]], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Limits(vocab_size=10, max_len=4).check(sequences)
    assert str(caught.value) == sentence


def test_latent_attention_is_refused_on_cpu_only() -> None:
    refuse_unsupported({"kv_lora_rank": 40}, on_cpu=False)
    refuse_unsupported({"num_attention_heads": 8}, on_cpu=True)
    with pytest.raises(UsageError) as caught:
        refuse_unsupported({"kv_lora_rank": 40}, on_cpu=True)
    assert str(caught.value) == "vLLM has no CPU kernels for multi-head latent attention; use --engine hf"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_dual_chunk_attention_is_refused(on_cpu: bool) -> None:
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}  # Qwen2.5-7B-1M
    with pytest.raises(UsageError, match="vLLM has no kernels for dual chunk attention: use"):
        refuse_unsupported({"dual_chunk_attention_config": chunks}, on_cpu=on_cpu)


def test_no_stage_is_without_a_layer() -> None:
    refuse_unsupported({"num_hidden_layers": 4}, on_cpu=True, pp=4)
    with pytest.raises(UsageError) as caught:
        refuse_unsupported({"num_hidden_layers": 4}, on_cpu=True, pp=8)
    assert str(caught.value) == "--engine-pp is 8 and this model has 4 layers: use 4 or fewer"


def test_experts_are_divided_where_there_are_some() -> None:
    refuse_unsupported({"num_experts": 16}, on_cpu=True, tp=2, ep=2)
    with pytest.raises(UsageError) as caught:
        refuse_unsupported({"num_attention_heads": 8}, on_cpu=True, tp=2, ep=2)
    assert str(caught.value) == "--engine-ep is 2 and this model has no experts to divide: leave it out"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_text_model_without_a_class_in_vllm_is_refused(on_cpu: bool) -> None:
    refuse_unsupported({"model_type": "qwen3_next", "linear_num_value_heads": 8}, on_cpu=on_cpu)
    with pytest.raises(UsageError, match="no class for a text model"):
        refuse_unsupported({"model_type": "qwen3_5_moe_text"}, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_experts": 16}, "experts"),
        ({"kv_lora_rank": 40}, "latent attention"),
        ({"hybrid_override_pattern": "M*M-"}, "state-space layers"),
        ({"linear_num_value_heads": 8}, "gated delta nets"),
    ],
)
def test_adapters_are_refused_where_they_are_cut_otherwise(settings: dict[str, object], what: str) -> None:
    refuse_adapters({"num_attention_heads": 8})
    with pytest.raises(UsageError) as caught:
        refuse_adapters(settings)
    assert str(caught.value) == (f"--engine-lora-rank takes dense models of plain attention, and this one has {what}")


@pytest.mark.parametrize(("cores", "tp", "threads"), [(2, 1, "2"), (2, 2, "1"), (4, 2, "2"), (1, 2, "1")])
def test_every_rank_gets_its_share_of_the_cores(
    cores: int, tp: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    config = EngineConfig(kind="vllm", checkpoint="anywhere", tp=tp)
    assert environment(config, ONE_THREAD_BYTES + 1)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("kind", "checkpoint_bytes", "threads"),
    [("hf", ONE_THREAD_BYTES, "1"), ("hf", ONE_THREAD_BYTES + 1, "4"), ("vllm", ONE_THREAD_BYTES, "1")],
)
def test_a_small_checkpoint_runs_on_one_thread(
    kind: str, checkpoint_bytes: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    config = EngineConfig(kind=kind, checkpoint="anywhere")
    assert environment(config, checkpoint_bytes)["OMP_NUM_THREADS"] == threads
