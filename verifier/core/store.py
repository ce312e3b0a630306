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
    """Inverse of `encode`; UsageError for a field that this version does not know."""
    record = _DECODER.decode(line)
    if not record.keys() <= _KNOWN:
        unknown = min(record.keys() - _KNOWN)
        raise UsageError(f"the trace holds a field `{unknown}` that this version of verifier does not know")
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


def read(path: Path) -> Trace:
    """Read a trace directory.

    Raises:
        UsageError: no trace there, another format, or a damaged line that is not the last of its file.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise UsageError(f"`{path}` holds no trace: there is no manifest.json") from problem
    except json.JSONDecodeError as problem:
        raise UsageError(f"`{path}/manifest.json` is not JSON: {problem}") from problem
    if manifest.get("format") != FORMAT:
        raise UsageError(f"`{path}` has trace format {manifest.get('format')}, this version reads format {FORMAT}")
    evidence: list[Evidence] = []
    for file in sorted((path / "evidence").glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                evidence.append(decode(line))
            except json.JSONDecodeError as problem:
                if number == len(lines) and not manifest.get("complete"):
                    continue  # the line that a dying run was writing
                raise UsageError(f"`{file.name}` line {number} of the trace `{path}` is damaged") from problem

    def load(key: str) -> torch.Tensor:
        from safetensors.torch import load_file

        file = path / "arrays" / f"{key}.safetensors"
        if not file.exists():
            raise KeyError(f"payload `{key}` is not in the trace")
        return load_file(file)["array"]

    return Trace(manifest, evidence, load)
