"""What upstream does on a GPU with no fix on, and that the report names the bug; with every fix, the run holds.

Each run leaves its row in `as-shipped/` beside the results, from which `python -m tests.dist.as_shipped page` draws the
GPU's part of docs/upstream.md.

What this does not exercise: which cuDNN loses gradients (test_attention.py), and latent attention in fp8 (vllm #48251),
whose derived matrices verifier/contracts/reload_vllm.py shows on the host.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.as_shipped import row_of, write
from tests.dist.clean_case import judge
from tests.h100.conftest import RESULTS
from tests.h100.models import MENDED, model
from tests.h100.test_attention import MENDED as CUDNN_MENDED
from tests.h100.test_attention import cudnn_version
from verifier.config import EngineOptions, RoundtripConfig

pytestmark = pytest.mark.h100(gpus=1)
ISSUES = {
    "WGT001": "miles #975", "WGT004": "miles #975", "PLN002": "miles #975", "ENG001": "vllm #44371",
    "ENG002": "vllm #44371",
}  # fmt: skip
"""Check -> the bug that its finding of NemotronH has to name."""
CASES = {
    "qwen3": EngineOptions(),
    "qwen3-tied": EngineOptions(),
    "qwen2": EngineOptions(),
    "llama": EngineOptions(),
    "qwen3-moe": EngineOptions(),
    "deepseek-v3": EngineOptions(sleep_level=2),
    "nemotron-h": EngineOptions(),
}


def expected_of(name):
    """Codes that have to be violated as shipped, each with the bug that its finding names."""
    if "nemotron" in name:
        return ISSUES
    return {"LSS001": "cuDNN before 9.19"} if "deepseek" in name and cudnn_version() < CUDNN_MENDED else {}


@pytest.mark.own_process
@pytest.mark.parametrize("name", CASES)
def test_family_as_shipped(name, runner, measured, tmp_path):
    config = RoundtripConfig(
        model=model(name), trace=tmp_path / "as-shipped", dtype="bfloat16", cycles=2, transport="ipc",
        engine=CASES[name],
    )  # fmt: skip
    rows = [row_of(runner, config, name)]
    runner.resources.stop_engines()
    expected = expected_of(name)
    if expected:
        fixed = replace(config, trace=tmp_path / "fixed", fixes=MENDED)
        rows.append(row_of(runner, fixed, name))
        runner.resources.stop_engines()
    results = Path(os.environ[RESULTS]).parent if RESULTS in os.environ else tmp_path
    write(rows, results / "as-shipped", f"cuda-{name.replace(':', '-')}")
    violated = rows[0]["violated"]
    measured(family=name, violated={code: found["explained_by"] for code, found in violated.items()})
    if rows[0]["failure"]:  # others took memory of this GPU while the engine slept
        assert "vllm #45620" in rows[0]["ended_by"], rows[0]["failure"]
    else:
        for code, issue in expected.items():
            assert issue in violated[code]["explained_by"], (code, violated[code])
    if expected:
        judge(tmp_path / "fixed")
    elif not rows[0]["failure"]:
        judge(tmp_path / "as-shipped")
