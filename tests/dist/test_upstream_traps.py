"""Two silent traps of megatron-core 0.19.2: avoided by default (test_clean_runs.py), and caught where they are not.

1. Virtual pipeline stages without `overlap_p2p_comm` train on wrong gradients. The assertion that forbids it is in the
   training script's argument parser only, so a library user never meets it. Sequences of one length keep it silent.
2. With `overlap_param_gather` an export after a step reads parameters that other ranks have not sent yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.launch.fork_launcher import ForkLauncher
from verifier.mesh import Mesh
from verifier.runs.setup import open_subject
from verifier.report.report import Report, report_of
from verifier.runs.roundtrip import engine_config_of
from verifier.runs.runner import Workshop, warm_manifest_of, warm_spec_of

LENGTH = 12
NUM_SEQUENCES = 16  # four micro-batches: with two, two stages never send and receive at once


@pytest.fixture(scope="module")
def workshop(trainer_launcher: ForkLauncher) -> Iterator[Workshop]:
    with Workshop(print, trainer_launcher) as found:
        yield found


def run(workshop: Workshop, function: str, mesh: Mesh, folder: Path) -> Report:
    """A round trip of two steps on sequences of one length."""
    config = RoundtripConfig(model="tiny:qwen3", trace=folder / "trace", mesh=mesh, engine=EngineOptions(kind="hf"), cycles=2)
    subject = open_subject(config.model, config.dtype, mesh)
    engine = workshop.engine(engine_config_of(config, subject))
    manifest = warm_manifest_of(config, subject)
    store.create(config.trace, manifest)
    work = folder / "work"
    work.mkdir()
    spec = warm_spec_of(config, subject, config.trace, work, engine)
    tokens = [token for batch in spec.batches for row in batch for token in row]
    rows = [tokens[begin : begin + LENGTH] for begin in range(0, 2 * NUM_SEQUENCES * LENGTH, LENGTH)]
    assert len(rows[-1]) == LENGTH
    spec = dataclasses.replace(
        spec, sequences=rows[:NUM_SEQUENCES], batches=[rows[:NUM_SEQUENCES], rows[NUM_SEQUENCES:]], long=()
    )
    workshop.launcher.run(
        function, world_size=mesh.world_size, run_dir=work / "ranks", args=spec.to_json(), mesh=mesh,
        deadline_s=300.0, collective_deadline_s=60.0,
    )  # fmt: skip
    workshop.complete(config.trace, spec, subject, engine, manifest)
    return report_of(store.read(config.trace), str(config.trace))


def violated(report: Report) -> dict[str, Stage]:
    """Codes of the violated checks, and the first bad stage of each."""
    return {
        outcome.code: outcome.finding.first_bad_stage
        for outcome in report.outcomes
        if outcome.verdict is Verdict.VIOLATED and outcome.finding is not None
    }


@pytest.mark.slow
def test_interleaved_stages_without_overlap_are_caught_by_the_gradients(workshop: Workshop, tmp_path: Path) -> None:
    found = violated(run(workshop, "trap_functions:without_p2p_overlap", Mesh(pp=2, vpp=2), tmp_path))
    assert found == {"LSS001": Stage.LOSS, "LSS002": Stage.LOSS}


@pytest.mark.slow
def test_an_export_of_stale_weights_is_caught_by_the_live_ones(workshop: Workshop, tmp_path: Path) -> None:
    found = violated(run(workshop, "trap_functions:without_param_sync", Mesh(dp=2), tmp_path))
    assert found["WGT005"] is Stage.EXPORT
    assert min(found.values()) is Stage.EXPORT


@pytest.mark.parametrize("mesh", [Mesh(pp=2, vpp=2), Mesh(dp=2)], ids=Mesh.label)
def test_by_default_neither_happens(workshop: Workshop, mesh: Mesh, tmp_path: Path) -> None:
    report = run(workshop, "verifier.runs.session_megatron:roundtrip", mesh, tmp_path)
    assert report.verdict is Verdict.HOLDS, violated(report)
