"""Lines of a file of JSON lines, each with the name that errors give it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verifier.errors import UsageError


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines of a file of text, each after its name in errors.

    Raises:
        UsageError: the file cannot be read, is not UTF-8 or has an empty line.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                if not line.strip():
                    raise UsageError(f"{where}: it is empty")
                yield where, line
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error
