"""vLLM that holds other weights than it is sent: rounded to fp8, or a base with an adapter."""

from __future__ import annotations

import pytest

from tests.h100.test_engine_options import CYCLES, config_of, run
from verifier.stages.engine.records import CheckpointView, QuantizedNames, SyncedTensor
from verifier.stages.logprob.records import EngineNoise


@pytest.mark.h100(gpus=1)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_quantising_engine(family, runner, measured, tmp_path):
    found = run(runner, measured, config_of(tmp_path / "trace", family, quantization="fp8"), engine_quantization="fp8")
    state = found.of(SyncedTensor, version=CYCLES)
    assert any(item.dtype == "float8_e4m3fn" for item in state)
    names = [name for item in found.of(QuantizedNames, version=CYCLES) for name in item.names]
    noise = next(found.of(EngineNoise, version=CYCLES, name="scored"))
    measured(quantized=len(names), engine_noise_mean=float(noise.mean), engine_noise_max=float(noise.greatest))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.embed_tokens.weight" not in names


@pytest.mark.h100(gpus=1)
def test_adapter_is_synced_and_the_base_left_alone(runner, measured, tmp_path):
    config = config_of(tmp_path / "trace", lora_rank=8)
    found = run(runner, measured, config, engine_lora_rank=8)
    held = [item.name for item in found.of(CheckpointView, version=CYCLES) if ".lora_" in item.name]
    measured(adapter_tensors=len(held))
    assert len(held) == 2 * 4 * 7
