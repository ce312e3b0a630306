"""`verifier roundtrip` as users run it: a whole process, judged by its exit code and its report.

The first command of the README runs by default.

What this does not exercise: other families and meshes (test_clean_runs.py), and 64 ranks (docs/measurements.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.clean_case import Case, Measured, run
from verifier.core import store
from verifier.mesh import Mesh
from verifier.report import report_of
from verifier.runs.model_under_test import DERIVED
from verifier.runs.runner import Runner

ROOT = Path(__file__).resolve().parents[2]
README_MODEL = ("--model", "tiny:qwen3-moe", "--tp", "2", "--pp", "2", "--ep", "2")
README_DEADLINE_S = 300.0
COMMANDS = [
    ("roundtrip", *README_MODEL, "--update", "noise"),
    ("roundtrip", *README_MODEL, "--dtype", "bf16"),
    ("roundtrip", "--model", "tiny:qwen3-moe", "--ep", "2", "--engine-tp", "2"),
    ("roundtrip", "--model", "tiny:qwen3-tied", "--pp", "2", "--engine-tp", "2"),
    ("roundtrip", "--model", "tiny:qwen3-tied", "--engine-pp", "2"),
    ("roundtrip", "--model", "tiny:qwen3-moe", "--engine-tp", "2", "--engine-pp", "2", "--engine-ep", "2"),
    ("roundtrip", "--model", "tiny:qwen3", "--tp", "2", "--pp", "2", "--engine-lora-rank", "8", "--fix", "bridge-5840"),
    ("roundtrip", "--model", "tiny:llama", "--dp", "2", "--engine-lora-rank=8", "--engine-tp=2", "--dtype", "bf16"),
    ("roundtrip", "--model", "tiny:deepseek-v3", "--tp", "2", "--ep", "2", "--engine", "hf"),
    ("roundtrip", "--model", "tiny:deepseek-v3", "--ep", "2", "--engine", "hf", "--dtype", "bf16"),
]


def command(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command that has to hold; its report."""
    places = ("--trace", str(folder / "trace"), "--json", str(folder / "report"))
    done = subprocess.run(
        [sys.executable, "-m", "verifier", *arguments, *places],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads((folder / "report").read_text())


def test_the_command_of_the_readme_holds_in_five_minutes(tmp_path: Path) -> None:
    """On cold resources: the start of everything is included."""
    began = time.monotonic()
    report = command(tmp_path, "roundtrip", *README_MODEL)
    took_s = time.monotonic() - began
    print(f"{took_s:.0f} s")
    assert report["verdict"] == "holds"
    assert {outcome["verdict"] for outcome in report["outcomes"]} == {"holds"}
    assert took_s < README_DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda value: "_".join(value).replace("--", ""))
def test_a_command_of_the_manual_holds(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert command(tmp_path, *arguments)["verdict"] == "holds"


@pytest.fixture
def biased(tmp_path: Path) -> Path:
    """A Qwen2 that transformers wrote: a family with biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=512, hidden_size=96, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=False, use_cache=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path / "qwen2")
    return tmp_path / "qwen2"


@pytest.mark.slow
def test_a_checkpoint_that_transformers_wrote_is_judged_by_its_row(
    runner: Runner, biased: Path, tmp_path: Path
) -> None:
    found = run(runner, Case(family=str(biased), mesh=Mesh(tp=2, pp=2)), tmp_path)
    runner.resources.stop_engines()
    assert found.num_bitwise == 51
    assert max(found.trainer_nats, found.engine_nats, found.sampled_nats) <= 1e-5
    assert store.read(tmp_path / "roundtrip").manifest.layout == "hand-written row"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("olmoe", Mesh()),
        ("olmoe", Mesh(ep=2, dp=2)),
        ("glm4_moe", Mesh(tp=2, pp=2)),
        ("mistral", Mesh(tp=2, pp=2)),
        ("deepseek_v2", Mesh(tp=2, pp=2)),
    ],
    ids=str,
)
def test_an_architecture_by_rules_is_judged_by_a_derived_layout(
    runner: Runner, family: str, mesh: Mesh, tmp_path: Path
) -> None:
    found = run(runner, Case(family=family, mesh=mesh), tmp_path)
    runner.resources.stop_engines()
    _require_judged_by_derived(found, tmp_path)


def _require_judged_by_derived(found: Measured, folder: Path) -> None:
    of_layouts = {"WGT001", "WGT005", "LSS001", "TRN001"}
    assert not of_layouts & {*found.without_subject}
    for command in ("golden", "roundtrip"):
        trace = store.read(folder / command)
        assert (trace.manifest.layout, report_of(trace, "").not_judged) == (DERIVED, ())
