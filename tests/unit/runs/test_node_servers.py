"""The forwarded environment, and a node that does not see the run's folder.

What this does not exercise: Ray, ranks and engines (tests/dist/test_train_ray.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.errors import UsageError
from verifier.runs.node_servers import NodeServer, forwarded, identity


def test_forwarded_variables_are_taken_over_and_absent_ones_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", ["theirs"])
    for name in (*forwarded(os.environ), "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen").touch()
    told = {"HF_HUB_OFFLINE": "1", "VERIFIER_X": "y"}
    found = NodeServer().adopt(told, ["ours"], str(tmp_path), str(tmp_path / "seen"))
    assert forwarded(os.environ) == told
    assert sys.path == ["ours", "theirs"]
    assert found == identity()
    for name in told:
        del os.environ[name]


def test_a_node_that_does_not_see_the_folder_of_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError, match=r"does not see .* put both on storage that all nodes share"):
        NodeServer().adopt(forwarded(os.environ), [], str(tmp_path), str(tmp_path / "absent"))


def test_a_task_says_which_signal_ended_the_raylet_that_started_it() -> None:
    waits = "from verifier.runs.node_servers import raylet_end; print('waits', flush=True); print(raylet_end())"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    raylet = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, env=environment)
    with raylet.stdout:  # type: ignore[union-attr]
        assert raylet.stdout.readline() == "waits\n"  # type: ignore[union-attr]
        time.sleep(0.5)
        os.kill(raylet.pid, signal.SIGKILL)
        assert raylet.stdout.read().startswith("killed by SIGKILL")  # type: ignore[union-attr]
    assert raylet.wait() == -signal.SIGKILL
