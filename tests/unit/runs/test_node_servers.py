"""The forwarded environment, and a node that does not see the run's folder.

What this does not exercise: Ray, ranks and engines (tests/dist/test_train_ray.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
