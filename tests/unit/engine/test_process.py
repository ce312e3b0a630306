"""What an engine's process does with its memory, counted by the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import resource, sys
from verifier.engine.server import keep_freed_memory
if sys.argv[1] == "kept": keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults(), faults())
"""
"""Page faults of the first 64 MiB, and of the next, made when those were free again."""


@pytest.mark.parametrize(("how", "again"), [("given-back", True), ("kept", False)])
def test_memory_is_faulted_in_again_only_where_it_was_given_back(how, again):
    run = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True, timeout=60)
    first, second = map(int, run.stdout.split())
    assert first > 100
    assert (second > first // 2) is again, (first, second)
