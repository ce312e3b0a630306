"""Gated delta nets (Qwen3-Next, Qwen3.5) on the CPU tier: weights and round trips hold over every kind of mesh.

The oracle scans in chunks of 64 tokens in float32, the trainer's stand-in in float64 (tests/unit/platform).

What this does not exercise: flash-linear-attention's kernels; images, which no text reaches.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.clean_case import compared, judge
from tests.scaled_configs import write_scaled_down
from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.data.arithmetic import tokenizer_files
from verifier.mesh import Mesh
from verifier.runs.runner import Runner

HF = EngineOptions(kind="hf")
MIXED = (Mesh(tp=2), Mesh(cp=2), Mesh(pp=2), Mesh(dp=2, ep=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("qwen3_5_text", mesh) for mesh in MIXED[:3]]
    + [(name, mesh) for name in ("qwen3_next", "qwen3_5_moe_text") for mesh in MIXED],
)
def test_weights_are_placed_and_exported(runner: Runner, name: str, mesh: Mesh, tmp_path: Path) -> None:
    assert compared(judge(runner.golden(GoldenConfig(model=f"tiny:{name}", trace=tmp_path / "t", mesh=mesh))), "WGT004")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2), Mesh(pp=2, dp=2, ep=2)], ids=Mesh.label)
def test_a_round_trip_of_a_published_mixture_holds(runner: Runner, mesh: Mesh, tmp_path: Path) -> None:
    """Beside parts that read images, with a layer for further tokens, and a layer's experts in one tensor."""
    model = str(write_scaled_down("Qwen3.5-35B-A3B", tmp_path, "float32"))
    config = RoundtripConfig(model=model, trace=tmp_path / "trace", mesh=mesh, cycles=1, engine=HF)
    outcome = judge(runner.roundtrip(config))
    assert compared(outcome, "LGP001")
    assert compared(outcome, "LSS001")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "ep"), [("Qwen3.5-27B", 2, 1), ("Qwen3.5-35B-A3B", 1, 1), ("Qwen3.5-35B-A3B", 2, 2)]
)
def test_a_round_trip_of_a_published_model_holds_with_vllm(
    runner: Runner, name: str, tp: int, ep: int, tmp_path: Path
) -> None:
    """vLLM fuses q, k, v and z of a delta net, and cuts its convolution in runs."""
    engine = EngineOptions(kind="vllm", tp=tp, ep=ep)
    model = str(write_scaled_down(name, tmp_path, "float32"))
    outcome = judge(runner.roundtrip(RoundtripConfig(model=model, trace=tmp_path / "trace", cycles=1, engine=engine)))
    assert compared(outcome, "ENG001")
    assert compared(outcome, "ENG007")
    assert compared(outcome, "LGP002")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MIXED, ids=Mesh.label)
def test_a_round_trip_holds_in_float32(runner: Runner, mesh: Mesh, tmp_path: Path) -> None:
    config = RoundtripConfig(model="tiny:qwen3_next", trace=tmp_path / "trace", mesh=mesh, cycles=1, engine=HF)
    assert compared(judge(runner.roundtrip(config)), "LGP001")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [*(("tiny:qwen3_next", mesh) for mesh in MIXED[:3]), ("Qwen3.5-35B-A3B", Mesh())]
)
def test_a_round_trip_holds_in_bfloat16_with_its_decay_in_float32(
    runner: Runner, name: str, mesh: Mesh, tmp_path: Path
) -> None:
    model = name if name.startswith("tiny:") else str(write_scaled_down(name, tmp_path, "bfloat16"))
    config = RoundtripConfig(
        model=model, trace=tmp_path / "trace", mesh=mesh, cycles=1, engine=HF, dtype="bfloat16", fixes=("miles-975",)
    )
    assert compared(judge(runner.roundtrip(config)), "LGP001")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("tiny:qwen3_next", ("algorithm=sft", "steps=2", "mesh.tp=2")),
        ("tiny:qwen3_next", ("algorithm=sft", "steps=3", "dtype=bf16", "fixes=[miles-975,megatron-2777]")),
        ("tiny:qwen3_next", ("algorithm=grpo", "steps=2", "engine.kind=hf", "grpo.max_answer_tokens=8")),
        ("Qwen3.5-35B-A3B", ("algorithm=sft", "steps=2", "mesh.tp=2")),
        ("Qwen3.5-35B-A3B", ("algorithm=sft", "steps=2", "mesh.pp=2", "mesh.dp=2", "mesh.ep=2")),
        ("Qwen3.5-35B-A3B", ("algorithm=grpo", "steps=2", "engine.kind=hf", "grpo.max_answer_tokens=8", "mesh.tp=2")),
        (
            "Qwen3.5-35B-A3B",
            ("algorithm=grpo", "steps=2", "grpo.max_answer_tokens=8", "mesh.pp=2", "mesh.dp=2", "mesh.ep=2"),
        ),
    ],
)
def test_a_judged_training_run_holds(name: str, knobs: tuple[str, ...], tmp_path: Path) -> None:
    """Packs of several samples, with the last export: megatron-core's norm behind a delta net holds weights less 1."""
    model: str | Path = name
    if not name.startswith("tiny:"):
        model = write_scaled_down(name, tmp_path, "float32")
        for file, content in tokenizer_files().items():
            (model / file).write_text(content)
    words = ("data.source=arithmetic", "data.batch_size=8", "batch.max_tokens=512", "verify.every=2", *knobs)
    command = [sys.executable, "-m", "verifier", "train", "--model", model, "--run", tmp_path / "run", "--verify"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
