"""Every fault can be injected into the installed upstream versions, and leaves each target as it was.

What this does not exercise: the bugs themselves, which trials run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.meta.sources import ROOT
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Side


@pytest.mark.parametrize("side", ["trainer", pytest.param("engine", marks=pytest.mark.slow)])
def test_injected_and_healed(side):
    command = [sys.executable, "-m", "tests.faults.injection", side]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    expected = sum((fault.side is Side.TRAINER) == (side == "trainer") for fault in CATALOG.values())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{expected} faults\n"), done.stdout
