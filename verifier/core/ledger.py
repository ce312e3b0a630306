"""A ledger: lines of JSON in a folder that one process has open, each on the disk before the next run begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from verifier.errors import UsageError


def read_lines(file: Path) -> list[bytes]:
    """Lines of a ledger, none of one that is not there; what its process was killed in is cut off."""
    content = file.read_bytes() if file.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(file, len(whole))
    return whole.splitlines()


def decode_line(file: Path, number: int, line: bytes, kind: type[Any], what: str) -> Any:
    """Return the row of a line, or raise a UsageError: it is no row of `what`, such as "gate"."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as problem:
        raise UsageError(f"line {number} of `{file}` is no row of a {what}: {problem}; remove it") from problem


def append_line(file: Path, row: Any) -> None:
    """Append a row; it is on the disk when this returns. A UsageError if the file cannot be written."""
    try:
        with file.open("ab") as stream:
            stream.write(msgspec.json.encode(row) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be written: {problem.strerror}") from problem
