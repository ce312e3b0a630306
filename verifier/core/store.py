"""A trace on disk: a manifest, JSON lines of evidence per recorder, safetensors payloads. No pickle.

Layout of a trace directory::

    manifest.json                  run identity; "complete" turns true only when the run has finished writing
    evidence/<role>-<rank>.jsonl   one fact a line, appended and flushed as it is seen
    arrays/<key>.safetensors       one payload array each, written aside and renamed

A run that dies leaves every line but possibly the last readable, and "complete": false.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.core.evidence import Evidence
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.errors import UsageError

if TYPE_CHECKING:
    import torch

FORMAT = 1
_MANIFEST_TYPES: dict[str, tuple[type[Any], type[Any] | None]] = {
    "scopes": (list, str),
    "synced_versions": (list, int),
    "untouched_versions": (list, int),
    "engine_ranks": (int, None),
    "world_size": (int, None),
    "num_gpus": (int, None),
    "mesh": (dict, None),
    "versions": (dict, None),
    "config": (dict, None),
}
"""Fields of a manifest that checks and reports take apart: their type, and that of a list's items."""
_MOST_RANKS = 1 << 16
"""More than any run has; each is looked for."""
_TYPES = {"kind": str, "name": str, "version": int, "rank": int, "role": str, "facts": dict}
"""Fields of evidence that checks sort by or look into."""
_FIELDS = tuple(field.name for field in fields(Evidence))
_KNOWN = frozenset(_FIELDS)
_STAGES = {stage.label: stage for stage in Stage}
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder()


def encode(evidence: Evidence, **stamp: Any) -> str:
    """One JSON line; fields that are empty are left out, those in `stamp` are written instead of the evidence's own."""
    record = {name: value for name in _FIELDS if (value := getattr(evidence, name)) not in (None, {}, ())}
    record |= stamp
    record["stage"] = evidence.stage.label
    if evidence.shape is not None:
        record["shape"] = evidence.shape
    return _ENCODER.encode(record)


def decode(line: str) -> Evidence:
    """Inverse of `encode`.

    Raises:
        UsageError: a field that this version does not know.
        ValueError, LookupError, TypeError, AttributeError: no line that `encode` made.
    """
    record = _DECODER.decode(line)
    if not record.keys() <= _KNOWN:
        unknown = min(record.keys() - _KNOWN)
        raise UsageError(f"the trace holds a field `{unknown}` that this version of verifier does not know")
    for name, kind in _TYPES.items():
        if name in record and not isinstance(record[name], kind):
            raise TypeError(f"`{name}` is {record[name]!r}")
    record["stage"] = _STAGES[record["stage"]]
    if "shape" in record:
        record["shape"] = tuple(record["shape"])
    return Evidence(**record)


def _refuse_full_disk(problem: OSError, path: Path) -> UsageError:
    if problem.errno == errno.ENOSPC:
        return UsageError(f"no space is left for the trace at `{path}`: free some, or choose another --trace")
    return UsageError(f"the trace at `{path}` cannot be written: {problem.strerror}")


class Recorder:
    """Appends facts to a trace directory; one per process. Implements `Probe`.

    Args:
        path: trace directory, made by `create`.
        role: "trainer", "engine", "oracle" or "source".
        rank: rank within the role; with the role it names the file, so no two recorders share one.
    """

    def __init__(self, path: Path, role: str, rank: int) -> None:
        self.path, self.role, self.rank = path, role, rank
        self._arrays = 0
        try:
            self._file = open(path / "evidence" / f"{role}-{rank:04d}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        except OSError as problem:
            raise _refuse_full_disk(problem, path) from problem

    def emit(self, evidence: Evidence, array: torch.Tensor | None = None) -> None:
        """Record one fact, stamped with this recorder's role and rank."""
        stamp: dict[str, Any] = {"role": self.role, "rank": self.rank}
        try:
            if array is not None:
                stamp["array"] = f"{self.role}-{self.rank:04d}-{self._arrays:06d}"
                self._arrays += 1
                _write_array(self.path / "arrays" / f"{stamp['array']}.safetensors", array)
            self._file.write(encode(evidence, **stamp) + "\n")
            self._file.flush()
        except OSError as problem:
            raise _refuse_full_disk(problem, self.path) from problem

    def close(self) -> None:
        """Flush to the device and close."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as problem:
            raise _refuse_full_disk(problem, self.path) from problem


def _write_array(path: Path, array: torch.Tensor) -> None:
    from safetensors.torch import save

    aside = path.with_suffix(".partial")
    aside.write_bytes(save({"array": array.detach().cpu().contiguous()}))
    aside.rename(path)


def require_writable(file: Path, *, make_folder: bool = False) -> None:
    """Refuse a result file that could not be written, before the run that it is the result of.

    Args:
        file: where the result is to go; what is there already stays as it is.
        make_folder: its folder may be absent, and is made then.

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
    """Make a folder that traces are to be kept in, and refuse one in use.

    Raises:
        UsageError: it holds something, or cannot be made or written.
    """
    require_writable(folder / "trace", make_folder=True)
    if any(folder.iterdir()):
        raise UsageError(f"the folder `{folder}` is not empty: choose another {option}")


def create(path: Path, manifest: Mapping[str, Any]) -> Path:
    """Make a trace directory with an incomplete manifest; nothing is left if it cannot be made whole.

    Raises:
        UsageError: it exists and is not empty, or cannot be written.
    """
    try:
        in_use = path.exists() and any(path.iterdir())
    except OSError as problem:
        raise _refuse_full_disk(problem, path) from problem
    if in_use:
        raise UsageError(f"the trace directory `{path}` is not empty: choose another --trace")
    try:
        (path / "evidence").mkdir(parents=True)
        (path / "arrays").mkdir()
        write_manifest(path, {**manifest, "complete": False})
    except OSError as problem:
        discard(path)
        raise _refuse_full_disk(problem, path) from problem
    except UsageError:
        discard(path)
        raise
    return path


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest atomically; the old one stays if the new one cannot be written whole."""
    aside = path / "manifest.partial"
    try:
        with open(aside, "w", encoding="utf-8") as stream:
            json.dump({"format": FORMAT, **manifest}, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        aside.rename(path / "manifest.json")
    except OSError as problem:
        raise _refuse_full_disk(problem, path) from problem


def discard(path: Path) -> None:
    """Remove a trace directory that could not be written whole."""
    shutil.rmtree(path, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise UsageError(f"`{path}` holds no trace: there is no manifest.json") from problem
    except OSError as problem:
        raise UsageError(f"`{path}/manifest.json` cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"`{path}/manifest.json` is not JSON: {problem}") from problem
    if not isinstance(manifest, dict):
        raise UsageError(f"`{path}/manifest.json` holds a JSON {type(manifest).__name__}, not an object")
    if manifest.get("format") != FORMAT:
        raise UsageError(f"`{path}` has trace format {manifest.get('format')}, this version reads format {FORMAT}")
    for key, (kind, item) in _MANIFEST_TYPES.items():
        value: Any = manifest.get(key, kind())
        fits = isinstance(value, kind) and (item is None or all(isinstance(part, item) for part in value))
        if not fits or (kind is int and not 0 <= value <= _MOST_RANKS):
            raise UsageError(f"`{path}/manifest.json` is damaged: `{key}` is {value!r}")
    return manifest


def read(path: Path) -> Trace:
    """Read a trace directory.

    Raises:
        UsageError: no trace there, another format, or a damaged line that is not the last of its file.
    """
    manifest = _read_manifest(path)
    evidence: list[Evidence] = []
    for file in sorted((path / "evidence").glob("*.jsonl")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as problem:
            raise UsageError(f"`{file}` cannot be read: {problem.strerror}") from problem
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                evidence.append(decode(line))
            except (ValueError, LookupError, TypeError, AttributeError) as problem:
                if number == len(lines) and not manifest.get("complete"):
                    continue  # the line that a dying run was writing
                raise UsageError(f"`{file.name}` line {number} of the trace `{path}` is damaged") from problem

    def load(key: str) -> torch.Tensor:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = path / "arrays" / f"{key}.safetensors"
        if not file.exists():
            raise KeyError(f"payload `{key}` is not in the trace")
        try:
            return load_file(file)["array"]
        except (OSError, KeyError, SafetensorError) as problem:
            raise ValueError(f"payload `{key}` of the trace is damaged: {problem}") from problem

    return Trace(manifest, evidence, load)
