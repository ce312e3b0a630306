"""Whole traces only: the manifest has a digest of every file and one of itself, and reading looks at all of them.

What is missing, extra, cut or changed ends in one sentence. A run that did not finish has no digests of its files yet:
its trace can be judged, and never holds.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash
from msgspec.structs import replace

from verifier.core.archive import OF_BATCHES, members
from verifier.core.manifest import FORMAT, Manifest
from verifier.core.record import ArrayRecord, Record, UnknownRecord, kind_of
from verifier.core.schema import decode
from verifier.core.trace import Trace
from verifier.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "manifest.json"
FOLDERS = {"evidence": ".jsonl", "arrays": ".safetensors", "logs": ".log"}
"""Folders of a trace, and the suffix of the files in each."""
KEPT_BYTES = 64 * 2**20
"""Contents of files that are kept in memory from the look at their digests to the checks, of one trace."""
ARCHIVE, BATCHES = "trace.tar.xz", "batches.tar.xz"
"""All files of a packed trace but its manifest, with the batches of its step; these alone once records are removed."""
_ASIDE = (f"{ARCHIVE}.partial", f"{BATCHES}.partial")
"""Archives that a process died writing."""
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no JSON of the type."""


class _Format(msgspec.Struct):
    format: int | None = None


def digest_of(contents: bytes) -> str:
    """Digest of a file's contents, against damage and mistakes, not forgers: 128 bits of XXH3, as fast as memory."""
    return "xxh3:" + xxhash.xxh3_128_hexdigest(contents)


def sealed(manifest: Manifest) -> bytes:
    """A manifest as it is stored, with its own digest."""
    own = digest_of(msgspec.json.encode(replace(manifest, digest=""), order="deterministic"))
    whole = replace(manifest, digest=own)
    return msgspec.json.format(msgspec.json.encode(whole, order="deterministic"), indent=1) + b"\n"


def digests_of(path: Path) -> dict[str, str]:
    """Digest of every file of a trace but its manifest, by its path within.

    Raises:
        UsageError: something else than a trace's files lies there.
    """
    return {name: digest_of(_contents(path, name)) for name in _listed(path, forgiving=True)}


def read(path: Path) -> Trace:
    """Read a trace directory, all of it.

    Raises:
        UsageError: no trace there, another format, or a trace that is not whole. What a later version added is none
            of these: its fields are left out, and records of its kinds are `Trace.unknown`.
    """
    manifest = _read_manifest(path)
    kept: dict[str, bytes] = {}
    if os.path.lexists(path / ARCHIVE):
        packed = members(path / ARCHIVE)
        names, room = sorted(name for name in packed if not name.startswith(OF_BATCHES)), 0

        def contents_of(name: str) -> bytes:
            return packed[name]()

    else:
        names, room = _listed(path, forgiving=not manifest.complete), KEPT_BYTES
        contents_of = functools.partial(_contents, path)
    if manifest.complete:
        if manifest.files and not has_evidence(path):
            raise UsageError(f"the records of the trace `{path}` were removed (verify.keep), its digests are kept")
        for name in sorted(manifest.files.keys() | set(names)):
            if name not in names:
                raise UsageError(f"the trace `{path}` is not whole: `{name}` is missing")
            if name not in manifest.files:
                raise UsageError(f"the trace `{path}` is not whole: `{name}` is no file of it")
            contents = contents_of(name)
            if digest_of(contents) != manifest.files[name]:
                raise UsageError(f"the trace `{path}` is damaged: `{name}` is not what the run wrote")
            room -= len(contents)
            if room >= 0:
                kept[name] = contents
    found: list[Record | UnknownRecord] = []
    for name in names:
        if name.startswith("evidence/"):
            contents = kept.pop(name, b"") or contents_of(name)
            found += _read_records(path, name, contents, forgiving=not manifest.complete)
    records = [item for item in found if isinstance(item, Record)]
    keys = {Path(name).stem for name in names if name.startswith("arrays/")}
    for record in records:
        if isinstance(record, ArrayRecord) and record.array not in keys:
            raise UsageError(f"the trace `{path}` is not whole: {kind_of(type(record))} `{record.name}` has no array")
    unknown = [item for item in found if isinstance(item, UnknownRecord)]
    return Trace(manifest, records, functools.partial(_arrays, contents_of, kept), unknown, str(path))


def _read_manifest(path: Path) -> Manifest:
    try:
        contents = _contents(path, MANIFEST)
    except FileNotFoundError as problem:
        raise UsageError(f"`{path}` holds no trace: there is no {MANIFEST}") from problem
    file = f"`{path}/{MANIFEST}`"
    try:
        found = msgspec.json.decode(contents, type=_Format).format
    except msgspec.ValidationError as problem:
        raise UsageError(f"{file} is no manifest of a trace: {problem}") from problem
    except _UNREADABLE as problem:
        raise UsageError(f"{file} is not JSON: {problem}") from problem
    if found != FORMAT:
        raise UsageError(f"`{path}` has trace format {found}, this version reads format {FORMAT}")
    try:
        manifest = msgspec.json.decode(contents, type=Manifest)
        # As it was written: by a version with other fields, perhaps.
        written = msgspec.json.encode({**msgspec.json.decode(contents), "digest": ""})
    except _UNREADABLE as problem:
        raise UsageError(f"{file} is damaged: {problem}") from problem
    if manifest.digest != digest_of(written):
        raise UsageError(f"{file} is damaged: it is not what the run wrote")
    return manifest


def _listed(path: Path, *, forgiving: bool) -> list[str]:
    """Paths within a trace of all files but its manifest, in order; if forgiving, without what a run died writing.

    Raises:
        UsageError: a link, a pipe, a device, or a file that no trace has.
    """
    found: list[str] = []
    try:
        for item in sorted(path.iterdir()):
            if item.name in (MANIFEST, BATCHES, *_ASIDE) or (forgiving and item.name == "manifest.partial"):
                continue
            if item.name not in FOLDERS or not stat.S_ISDIR(item.lstat().st_mode):
                raise UsageError(f"the trace `{path}` is not whole: `{item.name}` is no file of it")
            for file in sorted(item.iterdir()):
                if forgiving and file.suffix == ".partial":
                    continue
                if not stat.S_ISREG(file.lstat().st_mode) or file.suffix != FOLDERS[item.name]:
                    raise UsageError(f"the trace `{path}` is not whole: `{item.name}/{file.name}` is no file of it")
                found.append(f"{item.name}/{file.name}")
    except OSError as problem:
        raise UsageError(f"the trace `{path}` cannot be read: {problem.strerror}") from problem
    return found


def _contents(path: Path, name: str) -> bytes:
    """Contents of a file of a trace; a UsageError if it is a link, a pipe or a device, or cannot be read."""
    file = path / name
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise UsageError(f"`{file}` is no regular file")
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise FileNotFoundError(str(file)) from problem
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be read: {problem.strerror}") from problem


def has_evidence(path: Path) -> bool:
    """Tell whether the records of a trace are there, packed or not, and were not removed."""
    return (path / "evidence").is_dir() or (path / ARCHIVE).is_file()


def _read_records(path: Path, name: str, contents: bytes, *, forgiving: bool) -> list[Record | UnknownRecord]:
    lines = contents.split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(decode(line))
        except _UNREADABLE as problem:
            if forgiving and number == len(lines):
                continue
            raise UsageError(f"`{name}` line {number} of the trace `{path}` is damaged: {problem}") from problem
    return records


def _arrays(contents_of: Callable[[str], bytes], kept: Mapping[str, bytes], key: str) -> Mapping[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(kept.get(name := f"arrays/{key}.safetensors") or contents_of(name))
    except FileNotFoundError as problem:
        raise KeyError(f"array `{key}` is not in the trace") from problem
    except (SafetensorError, ValueError, KeyError) as problem:
        raise ValueError(f"array `{key}` of the trace is damaged: {problem}") from problem
