"""Shipped bugs of the engine's reload and of CUDA IPC, on GPUs: caught, in their own stage, and healed."""

from __future__ import annotations

import pytest

from tests.dist.clean_case import judge
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.faults.catalog import CATALOG
from verifier.mesh import Mesh
from verifier.report.report import report_of
from verifier.runs.runner import Phase
from verifier.stages.transport.records import Handover

RELOAD = (
    "reload-drops-one-load",
    "processing-applied-again",
    "runtime-buffer-lost",
    "same-shape-repack-missed",
    "fused-shards-exchanged",
)


def config_of(name, folder, **sizes):
    return RoundtripConfig(model=name, trace=folder, dtype="bfloat16", cycles=1, transport="ipc", **sizes)


TP4_GIB = 11.0
"""Memory on a GPU with four ranks: a rank of the trainer took 3.0 GiB on an H100, one of the engine 7.1."""
LONG = RELOAD[:3]
"""Faults whose models take longest."""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(
            pytest.param(name, Mesh(), marks=[pytest.mark.h100(gpus=1), *([pytest.mark.own_process] * (name in LONG))])
            for name in RELOAD
        ),
        *(
            pytest.param(name, Mesh(tp=4), marks=[pytest.mark.h100(gpus=4, gib=TP4_GIB), pytest.mark.own_process])
            for name in RELOAD
        ),
    ],
    ids=lambda value: value.label().replace(" ", "-") if isinstance(value, Mesh) else value,
)
def test_reload_fault_is_caught_where_it_sits(name, mesh, runner, measured, tmp_path):
    fault = CATALOG[name]
    sizes = {"mesh": mesh, "engine": EngineOptions(tp=mesh.tp)}
    config = config_of(fault.model, tmp_path / "faulted", **sizes)
    client = runner.engine(config).process.client()
    client.call("verifier.faults.injection:inject", name)
    try:
        trace = runner.roundtrip(config)
    finally:
        fired = sum(client.call("verifier.faults.injection:heal"))
        client.close()
    caught, first = verdicts(trace)
    measured(fault=name, mesh=mesh.label(), fired=fired, caught=caught, first_bad_stage=first)
    assert fired
    assert set(fault.caught_by) <= set(caught)
    assert first == fault.stage.label
    judge(runner.roundtrip(config_of(fault.model, tmp_path / "healed", **sizes)))


@pytest.mark.parametrize(
    "tp", [pytest.param(tp, marks=pytest.mark.h100(gpus=tp)) for tp in (2, 4)], ids=lambda tp: f"tp{tp}"
)
def test_handles_of_rank_0_alone_are_refused(tp, runner, measured, tmp_path):
    sizes = {"mesh": Mesh(tp=tp), "engine": EngineOptions(tp=tp)}
    config = config_of("tiny:qwen3", tmp_path / "faulted", **sizes)
    run_within("rank_0_shows_alone", runner, config)
    refusals = [item.refused for item in store.read(config.trace).of(Handover)]
    assert len(refusals) == 2  # of version 0, which brings the warm engine back, and of version 1
    caught, first = verdicts(config.trace)
    measured(fault="ipc-rank-0-handles-only", mesh=f"tp{tp}", refused=refusals[0], caught=caught, first_bad_stage=first)
    assert "TPT002" in caught
    assert all("engine rank 1" in text and "was given no buffer" in text for text in refusals)
    judge(runner.roundtrip(config_of("tiny:qwen3", tmp_path / "healed", **sizes)))


def run_within(function, runner, config):
    """A round trip whose ranks enter a function of `fault_functions`; its trace."""
    phase = Phase(trace=config.trace, within=(f"tests.h100.fault_functions:{function}",))
    return runner.roundtrip(config, phases=[phase])


def verdicts(trace):
    """Codes that are violated, and the label of the first bad stage, if any."""
    report = report_of(store.read(trace), str(trace))
    bad = [item for outcome in report.outcomes if outcome.finding for item in outcome.finding.bad]
    caught = [item.code for item in report.outcomes if item.verdict is Verdict.VIOLATED]
    return caught, min(bad, key=lambda item: item.place).stage.label if bad else None
