"""Temporary folders: gone with their owner, swept after a killed one, and nobody else's is touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.core.outputs import WorkFolder, sweep, work_folder

OWNER = (
    "import time; from verifier.core.outputs import WorkFolder\n"
    "folder = WorkFolder('run'); (folder.path / 'file').touch(); print(folder.path, flush=True); time.sleep(60)\n"
)

SHARING = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from verifier.core.outputs import WorkFolder, share_as
folder = WorkFolder("run")
if sys.argv[1] == "ours":
    share_as(folder.path)
memory = shared_memory.SharedMemory(create=True, size=64)
lock = multiprocessing.get_context("spawn").Lock()
print(resource_tracker._resource_tracker._pid, memory._name, "/sem." + lock._semlock.name[1:], flush=True)
time.sleep(60)
"""
"""A program with shared memory and a semaphore, which has them from multiprocessing."""


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


@contextlib.contextmanager
def sharing(temporary: Path, whose: str) -> Iterator[tuple[Callable[[], None], list[Path]]]:
    """A program that shares memory: how it is killed, with the process that would clean up, and its files."""
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", SHARING, whose]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        tracker, *names = program.stdout.readline().split()
        files = [Path(f"/dev/shm{name}") for name in names]

        def kill() -> None:
            os.kill(int(tracker), signal.SIGKILL)
            program.kill()
            program.wait()

        try:
            yield kill, files
        finally:
            kill()
            for file in files:
                file.unlink(missing_ok=True)


def test_shared_memory_and_semaphores_of_a_dead_owner_are_swept_and_of_no_other(temporary):
    """`psm_*` and `sem.mp-*` by the names that multiprocessing gives them, which say nothing of an owner."""
    with (
        sharing(temporary, "ours") as (kill, left),
        sharing(temporary, "ours") as (_, of_living),
        sharing(temporary, "others") as (kill_other, of_others),
    ):
        kill()
        kill_other()
        assert [file.name.startswith(start) for file, start in zip(of_others, ("psm_", "sem.mp-"), strict=True)] == [
            True
        ] * 2
        assert all(file.exists() for file in (*left, *of_living, *of_others))
        sweep()
        assert [file.exists() for file in (*left, *of_living, *of_others)] == [False] * 2 + [True] * 4


def test_shared_memory_goes_with_its_folder(temporary):
    with work_folder("run") as path:
        (named := Path(f"/dev/shm/{path.name}-0")).touch()
        (other := Path(f"/dev/shm/{path.name}")).touch()
    assert (named.exists(), other.exists()) == (False, True)
    other.unlink()
