"""The commands that docs/gpu.md tells a user to run, as a user runs them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verifier.mesh import Mesh

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
COMMANDS = re.findall(r"^verifier (?:roundtrip|golden) .*$", PAGE.read_text(), re.MULTILINE)
RUN_S = 300


def gpus_of(command):
    """Those of the mesh, whose GPUs the engine shares where the host has no more."""
    return Mesh.fitting(
        **{axis: int(size) for axis, size in re.findall(r" --(tp|pp|ep|cp|dp) (\d+)", command)}
    ).world_size


@pytest.mark.parametrize(
    "command", [pytest.param(found, marks=pytest.mark.h100(gpus=gpus_of(found))) for found in COMMANDS]
)
def test_command_of_the_page_holds(command, measured, tmp_path):
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    last = run.stdout.rstrip().rpartition("\n")[2]
    measured(command=command, said=last, seconds=round(time.monotonic() - began, 1))
    assert re.match(r"holds: (\d+) of \1 checks hold; ", last), last
