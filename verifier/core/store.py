"""A trace on disk: a manifest, JSON lines of records per recorder, safetensors arrays. No pickle.

Layout of a trace directory::

    manifest.json                  identity of the run; digests of all other files once the run has finished writing
    evidence/<role>-<rank>.jsonl   one record a line, appended and flushed as it is seen
    arrays/<key>.safetensors       the arrays of one record, written aside and renamed
    logs/<process>.log             of a run that broke: the ends of its processes' logs
    trace.tar.xz                   once packed: the three folders, and the batches of a step

A run that dies leaves every line but possibly the last readable, and "complete": false.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from msgspec.structs import replace

from verifier.core.archive import OF_BATCHES, members, write_archive
from verifier.core.manifest import Manifest
from verifier.core.outputs import remove
from verifier.core.reader import ARCHIVE, BATCHES, FOLDERS, MANIFEST, digests_of, has_evidence, read, sealed
from verifier.core.record import ONLY, Array, ArrayRecord, Record, Role, as_numpy
from verifier.core.schema import encode
from verifier.errors import Stopped, UsageError, VerifierError

__all__ = ["Recorder", "complete", "create", "discard", "fail", "forget", "pack", "read", "recording"]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Make a UsageError of what the machine refuses for the trace at this path."""
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise UsageError(
                f"no space is left for the trace at `{path}`: free some, or choose another --trace"
            ) from problem
        raise UsageError(f"the trace at `{path}` cannot be written: {problem.strerror}") from problem


class Recorder:
    """Appends records to a trace directory that `create` made. Implements `Probe`.

    Role and rank name the file, so each process has a recorder of its own.
    """

    def __init__(self, path: Path, role: Role, rank: int) -> None:
        self.path, self.role, self.rank = path, role, rank
        self._arrays = 0
        with _writing(path):
            self._file = open(path / "evidence" / f"{role}-{rank:04d}.jsonl", "ab")  # noqa: SIM115

    def emit(self, record: Record, array: Array | Mapping[str, Array] | None = None) -> None:
        """Record one fact, stamped with this recorder's role and rank, with its array, or with several by name."""
        record = replace(record, role=self.role, rank=self.rank)
        with _writing(self.path):
            if isinstance(record, ArrayRecord):
                assert array is not None, f"a record of {type(record).__name__} has an array"
                key = f"{self.role}-{self.rank:04d}-{self._arrays:06d}"
                self._arrays += 1
                _write_arrays(self.path / "arrays" / f"{key}.safetensors", array)
                record = replace(record, array=key)
            self._file.write(encode(record) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Flush to the device and close."""
        with _writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _write_arrays(path: Path, array: Array | Mapping[str, Array]) -> None:
    from safetensors.numpy import save

    named = array if isinstance(array, Mapping) else {ONLY: array}
    aside = path.with_suffix(".partial")
    aside.write_bytes(save({name: as_numpy(item) for name, item in named.items()}))
    aside.rename(path)


def create(path: Path, manifest: Manifest) -> Path:
    """Make a trace directory with an incomplete manifest; nothing is left if it cannot be made whole.

    Raises:
        UsageError: it exists and is not empty, or cannot be written.
    """
    in_use = UsageError(f"the trace directory `{path}` is not empty: choose another --trace")
    with _writing(path):
        if path.exists() and any(path.iterdir()):
            raise in_use
    try:
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / "evidence").mkdir()  # of two runs that are here at once, one can
    except UsageError as problem:
        with contextlib.suppress(OSError):
            path.rmdir()  # stays if another run has it
        raise (in_use if isinstance(problem.__cause__, FileExistsError) else problem) from problem.__cause__
    try:
        with _writing(path):
            (path / "arrays").mkdir()
        _write_manifest(path, replace(manifest, complete=False, failure="", files={}))
    except UsageError:
        discard(path)
        raise
    return path


def require_room(path: Path) -> None:
    """Refuse what `create` would refuse, before the run that the trace is for; nothing is left but folders above it.

    Raises:
        UsageError: see `create`.
    """
    was_there = path.is_dir()
    create(path, Manifest())
    if not was_there:
        discard(path)
        return
    for made in path.iterdir():
        remove(made)


def complete(path: Path, manifest: Manifest) -> None:
    """Declare a trace whole: its manifest gets the digest of every file that the run left."""
    with _writing(path):
        for aside in path.glob("*/*.partial"):
            aside.unlink()
    _write_manifest(path, replace(manifest, complete=True, failure="", files=digests_of(path)))


def fail(path: Path, manifest: Manifest, failure: str) -> None:
    """Say in the manifest what ended a run that did not finish."""
    _write_manifest(path, replace(manifest, complete=False, failure=failure, files={}))


def _write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically; the old one stays if the new one cannot be written whole."""
    aside = path / "manifest.partial"
    with _writing(path):
        with open(aside, "wb") as stream:
            stream.write(sealed(manifest))
            stream.flush()
            os.fsync(stream.fileno())
        aside.rename(path / MANIFEST)


def pack(path: Path, batches: Sequence[Path] = (), *, records: bool = True) -> None:
    """Move the files of a whole trace, and the batches of its step, into an archive; the trace reads as before.

    A kill leaves the files, the archive or both. What there is no room for stays as it is.

    Args:
        path: of the trace.
        batches: files of its step.
        records: False leaves them out; the manifest, with the digests of all files, stays.
    """
    whole, archive = path / ARCHIVE, path / (ARCHIVE if records else BATCHES)
    if not has_evidence(path):
        return
    if not archive.exists():
        try:
            size = sum(file.stat().st_size for file in path.rglob("*"))  # batches are about a fifth of it
            write_archive(archive, _to_pack(path, batches, records=records), 2 * size)
        except OSError:
            return
    for file in batches:
        file.unlink(missing_ok=True)
    for name in reversed(FOLDERS):  # evidence last: it tells that something is left
        shutil.rmtree(path / name, ignore_errors=True)
    if not records:
        whole.unlink(missing_ok=True)


def _to_pack(path: Path, batches: Sequence[Path], *, records: bool) -> Iterator[tuple[str, bytes]]:
    """Names and contents of what goes into an archive. Batches first: what repeats them follows."""
    if (path / ARCHIVE).exists():
        found = members(path / ARCHIVE).items()
        yield from ((name, contents()) for name, contents in found if name.startswith(OF_BATCHES))
        return
    yield from ((f"{OF_BATCHES}{file.name}", file.read_bytes()) for file in batches)
    for name in FOLDERS if records else ():
        yield from ((f"{name}/{file.name}", file.read_bytes()) for file in sorted((path / name).glob("*")))


def forget(path: Path, role: Role) -> None:
    """Remove what recorders of a role wrote into a trace that is not complete yet."""
    for file in (*path.glob(f"evidence/{role}-*.jsonl"), *path.glob(f"arrays/{role}-*.safetensors")):
        file.unlink()


def discard(path: Path) -> None:
    """Remove a trace directory that could not be written whole."""
    shutil.rmtree(path, ignore_errors=True)


def _keep(trace: Path, logs: Mapping[str, bytes]) -> None:
    """Put logs beside the evidence; a full disk costs the logs and not the error that they belong to."""
    with contextlib.suppress(OSError):
        for name, contents in logs.items():
            (trace / "logs").mkdir(exist_ok=True)
            (trace / "logs" / f"{name}.log").write_bytes(contents)


def now() -> str:
    """Time in UTC, as in ISO 8601."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


@contextlib.contextmanager
def recording(
    traces: Sequence[Path],
    manifest: Manifest,
    logs: Callable[[], Mapping[str, bytes]] = dict,
    broke: Callable[[Path, BaseException], bool] = lambda trace, problem: False,
    notes: Sequence[str] = (),
) -> Iterator[Callable[[Path], None]]:
    """Make trace directories, which are absent or empty, with this manifest; yields what marks one as complete.

    A usage error removes those that are not complete. Any other error marks them, and they get the `logs`: contents by
    the name of a process, asked for then. `broke` records what the error is evidence of, and tells whether it is a
    failure of the stack under test. `notes` are read at the end, so that the run may add to them.
    """
    incomplete: list[Path] = []
    manifest = replace(manifest, began=now())

    def finish(trace: Path) -> None:
        complete(trace, replace(manifest, ended=now(), notes=tuple(notes)))
        incomplete.remove(trace)

    try:
        for trace in traces:
            incomplete.append(create(trace, manifest))
        yield finish
    except UsageError:
        for trace in incomplete:
            discard(trace)
        raise
    except (VerifierError, Stopped) as problem:
        found = logs() if incomplete else {}
        for trace in incomplete:
            _keep(trace, found)
            facts = replace(manifest.facts, stack_failed=broke(trace, problem))
            fail(trace, replace(manifest, ended=now(), facts=facts, notes=tuple(notes)), str(problem))
        raise
