"""The engine's plain types and what they refuse."""

from __future__ import annotations

import pytest

from verifier.engine.engine import EngineConfig, check_sequences, refuse_adapters, refuse_unsupported
from verifier.engine.host import environment
from verifier.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "sglang"}, "there is no engine `sglang`; choose one of vllm, hf"),
        (
            {"kind": "vllm", "dtype": "float16"},
            "the engine cannot run in float16; choose one of float32, bfloat16",
        ),
        (
            {"kind": "hf", "tp": 2},
            "--engine hf runs on one rank, so --engine-tp 2 does not apply; leave it at 1",
        ),
        ({"kind": "vllm", "tp": 3}, "--engine-tp 3 is not one of 1, 2, 4, 8"),
    ],
)
def test_config_refuses(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(checkpoint="anywhere", **settings)
    assert str(caught.value) == sentence


def test_config_survives_json() -> None:
    config = EngineConfig(kind="vllm", checkpoint="anywhere", dtype="bfloat16", tp=2, max_model_len=64, seed=7)
    assert EngineConfig(**config.to_json()) == config


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
        check_sequences(sequences, vocab_size=10, max_len=4)
    assert str(caught.value) == sentence


def test_latent_attention_is_refused_on_cpu_only() -> None:
    refuse_unsupported({"kv_lora_rank": 40}, on_cpu=False)
    refuse_unsupported({"num_attention_heads": 8}, on_cpu=True)
    with pytest.raises(UsageError) as caught:
        refuse_unsupported({"kv_lora_rank": 40}, on_cpu=True)
    assert str(caught.value) == "vLLM has no CPU kernels for multi-head latent attention; use --engine hf"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_experts": 16}, "experts"),
        ({"kv_lora_rank": 40}, "latent attention"),
        ({"hybrid_override_pattern": "M*M-"}, "state-space layers"),
    ],
)
def test_adapters_are_refused_where_they_are_cut_otherwise(settings: dict[str, object], what: str) -> None:
    refuse_adapters({"num_attention_heads": 8})
    with pytest.raises(UsageError) as caught:
        refuse_adapters(settings)
    assert str(caught.value) == (f"--engine-lora-rank takes dense models of plain attention, and this one has {what}")


def test_every_rank_gets_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(cores: set[int], tp: int) -> str:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
        return environment(EngineConfig(kind="vllm", checkpoint="anywhere", tp=tp))["VLLM_CPU_OMP_THREADS_BIND"]

    assert bound({0, 1}, 1) == "0,1"
    assert bound({0, 1}, 2) == "0|1"
    assert bound({4, 5, 6, 7}, 2) == "4,5|6,7"
    assert bound({3}, 2) == "3|3"
