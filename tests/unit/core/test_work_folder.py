"""Temporary folders: gone with their owner, swept after a killed one, and nobody else's is touched."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.core.outputs import WorkFolder, sweep, work_folder

OWNER = (
    "import time; from verifier.core.outputs import WorkFolder\n"
    "folder = WorkFolder('run'); (folder.path / 'file').touch(); print(folder.path, flush=True); time.sleep(60)\n"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder that it has."""
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_it_is_closed_to_others_and_gone_afterwards(temporary):
    with work_folder("run") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert path.parent == temporary
    assert list(temporary.iterdir()) == []


def test_only_what_a_dead_owner_left_is_swept(owner, temporary):
    process, theirs = owner
    ours = WorkFolder("engine")
    assert sweep() == []
    assert (theirs / "file").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sweep() == [theirs]
    assert list(temporary.iterdir()) == [ours.path]
    ours.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_folders_of_other_users_stay(owner, temporary):
    process, theirs = owner
    process.kill()
    process.wait()
    os.chown(theirs, 65534, 65534)
    assert sweep() == []
    assert (theirs / "file").exists()


def test_a_link_is_not_followed(owner, temporary, tmp_path_factory):
    process, theirs = owner
    process.kill()
    process.wait()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept"
    shutil.move(theirs, elsewhere)
    (temporary / "verifier-run-link").symlink_to(elsewhere)
    assert sweep() == []
    assert (elsewhere / "file").exists()


def test_one_in_another_folder_is_gone_afterwards_and_not_swept(temporary, tmp_path_factory):
    under = tmp_path_factory.mktemp("traces")
    with work_folder("run", under) as path:
        assert path.parent == under
    (under / "verifier-run-left").mkdir()
    assert sweep() == []
    assert [item.name for item in under.iterdir()] == ["verifier-run-left"]
