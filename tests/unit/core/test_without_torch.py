"""A trace is judged alike, to the byte, where none of the heavy packages can be imported."""

import subprocess
import sys

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from tests.snapshots.check_traces import BROKEN, clean
from tests.unit.core.test_damage import record
from verifier.core.check import REGISTRY

PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
from verifier.cli.app import run
run(["replay", {trace!r}, "--json", {report!r}])
"""
HEAVY = ["torch", "transformers", "megatron", "vllm", "ray", "numba", "triton"]


@pytest.mark.parametrize("code", ["", "LGP001", "PCK001", "LGP004"])
def test_same_report_to_the_byte(code, tmp_path):
    record(tmp_path / "trace", BROKEN[code] if code else clean(), complete=True)
    said = []
    for blocked in ([], HEAVY):
        report = tmp_path / f"report-{len(blocked)}.json"
        program = PROGRAM.format(blocked=blocked, trace="trace", report=str(report))
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=60, cwd=tmp_path, check=False,
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        said.append((done.stdout, done.stderr, report.read_bytes()))
    assert said[0] == said[1]
    assert (b"\nviolated: " if code else f"\nholds: {len(REGISTRY)} of {len(REGISTRY)} ".encode()) in said[0][0]
