"""Runs that used to blame the wrong side: transformers' epsilon, and a load that dies without naming a parameter.

What this does not exercise: refusals (tests/unit/platform, tests/unit/campaign).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.errors import UsageError
from verifier.model.architectures_hf import write_scaled
from verifier.model.tiny import write_tiny
from verifier.platform.upstream_fixes import FIXES, TRANSFORMERS_LATENT
from verifier.report.report import explanation, report_of
from verifier.runs.runner import Runner, run_once


def _changed(folder: Path, model: Path, **changes: object) -> str:
    """A copy of a checkpoint with other values in its config.json."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@pytest.mark.slow
def test_transformers_epsilon_in_latent_attention_is_not_the_trainers(tmp_path: Path) -> None:
    """The engine, which is transformers as shipped, stands alone against the trainer and the definition."""
    trace = tmp_path / "trace"
    model = _changed(tmp_path / "model", write_scaled("glm4_moe_lite", tmp_path), rms_norm_eps=1e-3)
    config = RoundtripConfig(model=model, trace=trace, cycles=1, engine=EngineOptions(kind="hf"))
    run_once(Runner.roundtrip, config, print)
    report = report_of(store.read(trace), str(trace))
    explained = {item.code: explanation(item, report.manifest) for item in report.violated}
    assert {"LGP002", "LGP003"} <= explained.keys() <= set(FIXES[TRANSFORMERS_LATENT].checks)
    assert all(TRANSFORMERS_LATENT in said for said in explained.values())


@pytest.mark.slow
def test_a_load_without_a_mapping_names_the_parameter(tmp_path: Path) -> None:
    """Without a query rank the fused norm of `linear_q_proj` has none; the checkpoint's own tensors are as before."""
    model = _changed(tmp_path / "model", write_tiny("deepseek-v3", tmp_path), q_lora_rank=None)
    with pytest.raises(UsageError, match=r"decoder\.layers\.\*\.self_attention\.linear_q_proj\.layer_norm_weight"):
        run_once(Runner.golden, GoldenConfig(model=model, trace=tmp_path / "trace"), print)
