"""Places that results are to be written to: refused before the run if they cannot be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verifier.errors import UsageError, VerifierError

T = TypeVar("T")


def require_writable(file: Path, *, make_folder: bool = False) -> None:
    """Refuse a result file that could not be written, before the run that it is the result of.

    What is there already stays as it is. Its folder may be absent with `make_folder`, and is made then.

    Raises:
        UsageError: it cannot be written, or is a folder.
    """
    aside = file.parent / f".{file.name}.{os.getpid()}.partial"
    try:
        if file.is_dir():
            raise UsageError(f"`{file}` is a folder, a file for the results is needed")
        if file.exists() and not file.is_file():
            raise UsageError(f"`{file}` is a device or a pipe, a file for the results is needed")
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        aside.touch()
        aside.unlink()
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be written: {problem.strerror}") from problem


def require_empty(folder: Path, option: str) -> None:
    """Make a folder that traces are to be kept in; a UsageError if it holds something or cannot be written."""
    require_writable(folder / "trace", make_folder=True)
    if any(folder.iterdir()):
        raise UsageError(f"the folder `{folder}` is not empty: choose another {option}")


def write_whole(file: Path, text: str) -> None:
    """Write a file whole, or raise a UsageError and leave what was at the path before."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(file)
    except OSError as problem:
        aside.unlink(missing_ok=True)
        raise UsageError(f"`{file}` cannot be written: {problem.strerror}") from problem


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that it holds; or nothing, if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def json_text(value: Any) -> str:
    """A record as indented JSON, as `read_as` takes it again."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def read_as(file: Path, kind: type[T], what: str) -> T:
    """Read a file of JSON as a record; `what` is it in the words of a refusal.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be read: {problem.strerror}") from problem
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise UsageError(f"`{file}` is not {what}: {' '.join(str(problem).split())}") from problem


@contextlib.contextmanager
def locked_folder(folder: Path, lock: str, what: str, other: str) -> Iterator[None]:
    """Make a folder and keep others out of it until exit.

    Args:
        folder: made if it is absent.
        lock: name of the file in it that is locked.
        what: name of the folder in a refusal, such as "run folder".
        other: name of who else may use it, such as "run".

    Raises:
        UsageError: it is in use, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not blocking: a pipe in its place would wait for a reader.
        held = open(folder / lock, "a", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK, 0o666))  # noqa: SIM115
    except OSError as problem:
        raise UsageError(f"the {what} `{folder}` cannot be written: {problem.strerror}") from problem
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise UsageError(f"the {what} `{folder}` is in use by another {other}: choose another") from problem
        yield


@contextlib.contextmanager
def full_disk_refused(path: Path) -> Iterator[None]:
    """Make a UsageError of a full disk, which other libraries report by errors of their own that have its text.

    A quota and a limit of the size of files end the same way.
    """
    try:
        yield
    except VerifierError:
        raise
    except Exception as problem:
        texts = (os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        reason = next((text for text in texts if text in str(problem)), None)
        if reason is None:
            raise
        raise UsageError(
            f"`{path}` cannot be written: {reason}; free some space and run the same command again, which continues "
            "from the last checkpoint"
        ) from problem


def printable(text: str) -> str:
    """One line of text in which control characters, and those that turn its direction, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


_PREFIX = "verifier-"
_MEMORY = Path("/dev/shm")  # noqa: S108 - Linux's own
_LOCK = ".owner"
"""File in the folder that its owner has locked; the kernel takes the lock away when the owner ends, however it ends."""


class WorkFolder:
    """A folder for temporary files that nobody else may open, mode 0700.

    Args:
        kind: middle of its name, for people who look into the temporary folder.
        under: folder that it is made in; by default that for temporary files, the only one that is swept.

    Source:
        flock(2): a lock belongs to the open file, and is gone with the last descriptor of it.
    """

    def __init__(self, kind: str, under: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=under)).absolute()
        aside = self.path / f"{_LOCK}.partial"
        self._lock = os.open(aside, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        aside.rename(self.path / _LOCK)  # no sweeper sees it without its lock

    def close(self) -> None:
        """Remove it and all that it holds, and shared memory of its name; semaphores go with who holds them."""
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_shared(f"{self.path.name}-*")
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def work_folder(kind: str, under: Path | None = None) -> Iterator[Path]:
    """A `WorkFolder` that is gone afterwards."""
    folder = WorkFolder(kind, under)
    try:
        yield folder.path
    finally:
        folder.close()


def share_as(folder: Path) -> None:
    """Name shared memory and semaphores of this process, and of those that it forks, by a work folder; see `sweep`.

    Source:
        CPython 3.12, multiprocessing: `shared_memory._make_filename` ("psm_" and 8 digits), and `_make_name` of
        `synchronize.SemLock` ("sem.mp-" and 8 letters). Both name files in memory, of nobody that one could find.
    """
    import multiprocessing.shared_memory

    multiprocessing.current_process()._config["semprefix"] = f"/{folder.name}"  # type: ignore[attr-defined]
    multiprocessing.shared_memory._make_filename = lambda: f"/{folder.name}-{secrets.token_hex(4)}"  # type: ignore[attr-defined]


def _remove_shared(*patterns: str) -> None:
    for pattern in patterns:
        for file in _MEMORY.glob(pattern):
            file.unlink(missing_ok=True)


def sweep() -> list[Path]:
    """Remove the work folders of this user whose owners are dead, with the files in memory of their names.

    Returns the folders.
    """
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
        _remove_shared(f"{path.name}-*", f"sem.{path.name}-*")
    except OSError:  # its owner lives
        return False
    finally:
        os.close(lock)
    return True
