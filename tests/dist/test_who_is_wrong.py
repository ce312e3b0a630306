"""Runs that used to blame the wrong side: transformers' epsilon, and a load that dies without naming a parameter.

What this does not exercise: refusals (tests/unit/platform, tests/unit/campaign).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.errors import VerifierError
from verifier.model.architectures_hf import write_scaled
from verifier.model.tiny import write_tiny
from verifier.platform.upstream_fixes import TRANSFORMERS_LATENT
from verifier.report.report import explanation, report_of
from verifier.runs.runner import Runner, run_once


@pytest.mark.slow
def test_transformers_epsilon_in_latent_attention_is_not_the_trainers(tmp_path: Path) -> None:
    """GLM-4.7-Flash says 1e-5: the engine, which is transformers, stands alone against trainer and definition."""
    model, trace = str(write_scaled("glm4_moe_lite", tmp_path)), tmp_path / "trace"
    config = RoundtripConfig(model=model, trace=trace, cycles=1, engine=EngineOptions(kind="hf"))
    run_once(Runner.roundtrip, config, print)
    report = report_of(store.read(trace), str(trace))
    assert {item.code for item in report.violated} == {"LGP002", "LGP003"}
    assert all(TRANSFORMERS_LATENT in explanation(item, report.manifest) for item in report.violated)


@pytest.mark.slow
def test_a_load_without_a_mapping_names_the_parameter(tmp_path: Path) -> None:
    """Without a query rank the fused norm of `linear_q_proj` has none; the checkpoint's own tensors are as before."""
    model, trace = tmp_path / "model", tmp_path / "trace"
    shutil.copytree(write_tiny("deepseek-v3", tmp_path), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "q_lora_rank": None}))
    with pytest.raises(VerifierError, match=r"decoder\.layers\.\*\.self_attention\.linear_q_proj\.layer_norm_weight"):
        run_once(Runner.golden, GoldenConfig(model=str(model), trace=trace), print)
