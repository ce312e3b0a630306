"""A run that nobody looks at: its controller and its ranks know of no probe, and every hook of theirs does nothing."""

from __future__ import annotations

import subprocess
import sys

from tests.meta.sources import ROOT
from verifier.trainer.observer import SILENT, RankObserver, TransferObserver, UpdateObserver


def test_ranks_that_nobody_looks_at_load_no_probe():
    """They are forked from a process that has run `preload`."""
    program = """
import sys
import verifier.trainer.worker_megatron
from verifier.trainer.preload_megatron import preload
print([name for name in sys.modules if name.startswith("verifier.") and ".probe" in name])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_hooks_that_nobody_takes_change_nothing():
    stream = iter([("a", None)])
    assert TransferObserver(3).exported(stream) is stream  # type: ignore[arg-type]
    assert RankObserver().on_scores("current", "000001-00", ()) is None
    assert RankObserver().on_checkpoint(1) == ()
    assert not UpdateObserver.keeps_rows
    assert (SILENT.note(), SILENT.before_export(1), SILENT.ranks, SILENT.judges) == (None, None, "", False)
