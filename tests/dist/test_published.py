"""A published model on every kind of mesh, in both engines and dtypes, from three seeds: every check holds.

`published:smollm2-135m` as it ships, tied and trained. One row runs with each value of each column at least once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import VLLM_HEADS
from verifier.report.report import Report, report_of
from verifier.runs.runner import run_once
from verifier.runs.runner import Runner

MODEL = "published:smollm2-135m"
STALE = "model.embed_tokens.weight in lm_head.cpu_linear"
ROWS = [
    (Mesh(pp=2), "vllm", "float32", 0),
    (Mesh(tp=3), "hf", "float32", 1),
    (Mesh(cp=2), "vllm", "bfloat16", 1),
    (Mesh(dp=2), "hf", "bfloat16", 2),
    (Mesh(tp=3), "vllm", "bfloat16", 0),
    (Mesh(pp=2), "hf", "bfloat16", 1),
    (Mesh(cp=2), "hf", "float32", 2),
    (Mesh(dp=2), "vllm", "float32", 2),
]
"""Mesh, engine, dtype and seed: each mesh with both engines and both dtypes, and each seed with both engines."""


def round_trip(folder: Path, mesh: Mesh, kind: str, dtype: str, seed: int, fixes: tuple[str, ...]) -> Report:
    config = RoundtripConfig(
        model=MODEL, trace=folder / "roundtrip", mesh=mesh, dtype=dtype, seed=seed, fixes=fixes, cycles=2,
        engine=EngineOptions(kind=kind), timeout_s=3000.0,
    )  # fmt: skip
    return judged(run_once(Runner.roundtrip, config, print))


def judged(trace: Path) -> Report:
    return report_of(store.read(trace))


def violated(report: Report) -> list[str]:
    return [str(finding) for finding in report.findings if finding.verdict is not Verdict.HOLDS]
