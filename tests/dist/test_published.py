"""A published model on each kind of mesh, in both engines and dtypes, from three seeds: all hold; and as shipped.

Of the 48 combinations a Latin square is run: each mesh with both engines and both dtypes, and each seed with all four
of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dist.clean_case import judge
from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import VLLM_HEADS
from verifier.report.report import report_of
from verifier.runs.runner import Runner, run_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]

MODEL = "published:smollm2-135m"
PP2, TP3, CP2, DP2 = Mesh(pp=2), Mesh(tp=3), Mesh(cp=2), Mesh(dp=2)
"""Three ranks of tensor parallelism divide its 9 heads and 3 key-value heads; two do not."""
ROWS = (
    (PP2, "vllm", "float32", 0),
    (TP3, "hf", "float32", 0),
    (CP2, "vllm", "bfloat16", 0),
    (DP2, "hf", "bfloat16", 0),
    (TP3, "vllm", "bfloat16", 1),
    (PP2, "hf", "bfloat16", 1),
    (DP2, "vllm", "float32", 1),
    (CP2, "hf", "float32", 1),
    (PP2, "vllm", "bfloat16", 2),
    (TP3, "vllm", "float32", 2),
    (CP2, "hf", "bfloat16", 2),
    (DP2, "hf", "float32", 2),
)


def round_trip(folder: Path, mesh: Mesh, kind: str, dtype: str, seed: int, fixes: Sequence[str] = ()) -> Path:
    config = RoundtripConfig(
        model=MODEL, trace=folder / "roundtrip", mesh=mesh, dtype=dtype, seed=seed, fixes=tuple(fixes),
        engine=EngineOptions(kind=kind),
    )  # fmt: skip
    return run_once(Runner.roundtrip, config, print)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].label()}-{row[1]}-{row[2]}-seed{row[3]}")
def test_it_holds_from_end_to_end(tmp_path: Path, row: tuple[Mesh, str, str, int]) -> None:
    mesh, kind, dtype, seed = row
    judge(round_trip(tmp_path, mesh, kind, dtype, seed, [VLLM_HEADS] if kind == "vllm" else []))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_export_is_the_checkpoint(tmp_path: Path, dtype: str) -> None:
    judge(run_once(Runner.golden, GoldenConfig(model=MODEL, trace=tmp_path / "golden", mesh=PP2, dtype=dtype), print))


def test_as_shipped_the_engine_keeps_the_old_head(tmp_path: Path) -> None:
    trace = round_trip(tmp_path, PP2, "vllm", "float32", 0)
    report = report_of(store.read(trace), str(trace))
    assert report.verdict is Verdict.VIOLATED
    first = next(item.finding for item in report.outcomes if item.finding is not None)
    assert "lm_head.cpu_linear" in str(first)
