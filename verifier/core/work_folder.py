"""Temporary folders of a run, each locked while its owner lives: the next run sweeps what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "verifier-"
_LOCK = ".owner"
"""File in the folder that its owner has locked; the kernel takes the lock away when the owner ends, however it ends."""


class WorkFolder:
    """A folder for temporary files that nobody else may open, mode 0700.

    Args:
        kind: middle of its name, for people who look into the temporary folder.

    Source:
        flock(2): a lock belongs to the open file, and is gone with the last descriptor of it.
    """

    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        aside = self.path / f"{_LOCK}.partial"
        self._lock = os.open(aside, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        aside.rename(self.path / _LOCK)  # no sweeper sees it without its lock

    def close(self) -> None:
        """Remove it and all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def work_folder(kind: str) -> Iterator[Path]:
    """A `WorkFolder` that is gone afterwards."""
    folder = WorkFolder(kind)
    try:
        yield folder.path
    finally:
        folder.close()


def sweep() -> list[Path]:
    """Remove the work folders of this user whose owners are dead; returns them."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*") if _swept(path)]


def _swept(path: Path) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another's, or no work folder
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its owner lives
        return False
    finally:
        os.close(lock)
    return True
