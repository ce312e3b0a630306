"""A trace is judged alike, to the byte, where none of the heavy packages can be imported."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from tests.snapshots.check_traces import BROKEN, clean
from tests.unit.core.test_damage import record

PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
from verifier.cli.app import run
run(["replay", {trace!r}, "--json", {report!r}])
"""
HEAVY = ["torch", "transformers", "megatron", "vllm", "ray", "numba", "triton"]


RECORDED = Path(__file__).with_name("recorded")
"""Traces that were recorded: a step of GRPO, the export of that run, and a round trip."""


@pytest.mark.parametrize("code", ["", "LGP001", "PCK001", "LGP004"])
def test_same_report_to_the_byte(code, tmp_path):
    record(tmp_path / "trace", BROKEN[code] if code else clean(), complete=True)
    assert (b"\nviolated: " if code else b"\nholds: ") in judged_twice(tmp_path)


@pytest.mark.parametrize("name", ["step", "export", "roundtrip"])
def test_recorded_runs_hold_without_them(name, tmp_path):
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path / "trace", filter="data")
    assert b"\nholds: " in judged_twice(tmp_path)


def judged_twice(folder: Path) -> bytes:
    """What `verifier replay` says of the folder's trace, the same with and without the heavy packages."""
    said = []
    for blocked in ([], HEAVY):
        report = folder / f"report-{len(blocked)}.json"
        program = PROGRAM.format(blocked=blocked, trace="trace", report=str(report))
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=60, cwd=folder, check=False,
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        said.append((done.stdout, done.stderr, report.read_bytes()))
    assert said[0] == said[1]
    return said[0][0]
