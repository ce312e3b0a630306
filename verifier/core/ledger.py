"""Files of JSON lines; and ledgers, in a folder that one process has open, each row on the disk before the next run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verifier.errors import UsageError

T = TypeVar("T")


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
    append_rows(file, [row], settle=True)


def lines_of(rows: Iterable[Any]) -> str:
    """Rows as JSON, a line each; numbers that are not finite stay such."""
    return "".join(json.dumps(msgspec.to_builtins(row)) + "\n" for row in rows)


def append_rows(file: Path, rows: Iterable[Any], *, settle: bool = False) -> None:
    """Append rows, on the disk when this returns if asked. A UsageError if the file cannot be written."""
    try:
        with file.open("ab") as stream:
            stream.write(lines_of(rows).encode())
            if settle:
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be written: {problem.strerror}") from problem


def read_rows(file: Path, kind: type[T]) -> list[T]:
    """Rows of a file of JSON lines; none of one that is not there. A line that is no row, or was cut, is left out."""
    rows = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, msgspec.ValidationError):
            rows.append(msgspec.convert(json.loads(line), kind))
    return rows
