"""Two silent traps of megatron-core 0.19.2: avoided by default (test_clean_runs.py), and caught where they are not.

1. Virtual pipeline stages without `overlap_p2p_comm` train on wrong gradients. The assertion that forbids it is in the
   training script's argument parser only, so a library user never meets it. Sequences of one length keep it silent.
2. With `overlap_param_gather` an export after a step reads parameters that other ranks have not sent yet.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.mesh import Mesh
from verifier.model.tiny import TINY
from verifier.report.report import Report, report_of
from verifier.runs.runner import Phase, Runner
from verifier.runs.scenario import made_up, workload
from verifier.runs.workload import Workload

pytestmark = pytest.mark.slow
LENGTH = 12
NUM_SEQUENCES = 16  # four micro-batches: with two, two stages never send and receive at once


def equal_lengths(config: RoundtripConfig) -> Workload:
    """Two steps on sequences of one length."""
    drawn = made_up(config, TINY[config.model.removeprefix("tiny:")][1])
    tokens = [token for batch in drawn.batches for row in batch for token in row.tokens]
    rows = [tokens[begin : begin + LENGTH] for begin in range(0, 2 * NUM_SEQUENCES * LENGTH, LENGTH)]
    assert len(rows[-1]) == LENGTH
    batches = [rows[:NUM_SEQUENCES], rows[NUM_SEQUENCES:]]
    return workload(batches[0], batches, drawn.prompts)


def run(runner: Runner, mesh: Mesh, folder: Path, within: tuple[str, ...] = ()) -> Report:
    engine = EngineOptions(kind="hf")
    config = RoundtripConfig(model="tiny:qwen3", trace=folder / "trace", mesh=mesh, engine=engine, cycles=2)
    runner.roundtrip(config, phases=[Phase(trace=config.trace, within=within)], workload=equal_lengths(config))
    return report_of(store.read(config.trace), str(config.trace))


def violated(report: Report) -> dict[str, Stage]:
    """Codes of the violated checks, and the first bad stage of each."""
    return {
        outcome.code: outcome.finding.first_bad_stage
        for outcome in report.outcomes
        if outcome.verdict is Verdict.VIOLATED and outcome.finding is not None
    }


def test_interleaved_stages_without_overlap_are_caught_by_the_gradients(runner: Runner, tmp_path: Path) -> None:
    found = violated(run(runner, Mesh(pp=2, vpp=2), tmp_path, ("trap_functions:without_p2p_overlap",)))
    assert found == {"LSS001": Stage.LOSS, "LSS002": Stage.LOSS}


def test_an_export_of_stale_weights_is_caught_by_the_live_ones(runner: Runner, tmp_path: Path) -> None:
    found = violated(run(runner, Mesh(dp=2), tmp_path, ("trap_functions:without_param_sync",)))
    assert found["WGT005"] is Stage.EXPORT
    assert min(found.values()) is Stage.EXPORT


@pytest.mark.parametrize("mesh", [Mesh(pp=2, vpp=2), Mesh(dp=2)], ids=Mesh.label)
def test_by_default_neither_happens(runner: Runner, mesh: Mesh, tmp_path: Path) -> None:
    report = run(runner, mesh, tmp_path)
    assert report.verdict is Verdict.HOLDS, violated(report)
