"""The judge's process ends with its run, however that ends, and its own death is named.

What this does not exercise: verdicts (tests/unit/probes), and a whole run (tests/dist/test_train_kill.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.cli.train import started_judge
from verifier.core import store
from verifier.core.manifest import Manifest
from verifier.errors import InternalError, UsageError

RUN = """
import time
from pathlib import Path
from verifier.cli.train import started_judge
if __name__ == "__main__":
    with started_judge() as judge:
        print(type(judge.submit(Path("absent")).exception(60)).__name__, flush=True)
        time.sleep(600)
"""
"""Starts a judge, has it judge a trace that is not there, and waits."""
LEFT_S = 2.0
"""Seconds after which nothing of a killed run is left."""


def test_nothing_holds_the_output_of_a_run_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"UsageError\n"
        run.kill()
        run.communicate(timeout=LEFT_S)  # ends when the last process has closed it


def test_a_step_is_packed_with_its_batches_before_the_process_ends(tmp_path: Path) -> None:
    trace, batch = store.create(tmp_path / "steps" / "000001", Manifest()), tmp_path / "batches/000001-00.safetensors"
    store.Recorder(trace, "controller", 0).close()
    store.complete(trace, Manifest())
    batch.parent.mkdir()
    batch.touch()
    with started_judge() as judge:
        judge.pack(trace)
        judge.submit(trace).result(60)
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["manifest.json", "trace.tar.xz"]
    assert store.read(trace).manifest.complete


def test_the_signal_that_killed_the_judge_is_named() -> None:
    before = {item.pid for item in active_children()}
    with started_judge() as judge:
        assert isinstance(judge.submit(Path("absent")).exception(60), UsageError)
        (process,) = [item for item in active_children() if item.pid not in before]
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="judge's process has ended: killed by SIGKILL"):
            judge.submit(Path("absent")).result(15)
