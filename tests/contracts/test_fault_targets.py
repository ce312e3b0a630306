"""Functions that the faults of the catalogue stand in for: each is there in the pinned versions, with its parameters.

What this does not exercise: faults of GPUs, whose trials are tests of `tests/h100`, and what a fault does.
"""

from __future__ import annotations

import subprocess
import sys

from tests.meta.sources import ROOT

LOST = """
from verifier.platform import cpu

cpu.install()
import verifier.checks
from verifier.errors import ContractError
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import replaced

for fault in CATALOG.values():
    for target, body in fault.replacements if not fault.gpus else ():
        try:
            with replaced(target, body):
                pass
        except ContractError as problem:
            print("LOST", fault.id, problem)
print("SEEN", len(CATALOG))
"""


def test_every_fault_has_what_it_replaces():
    """In a process of its own, which imports trainer and engine both."""
    done = subprocess.run([sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert "SEEN" in done.stdout, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("LOST")] == []
