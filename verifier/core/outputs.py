"""Places that results are to be written to: refused before the run if they cannot be."""

from __future__ import annotations

import os
from pathlib import Path

from verifier.errors import UsageError


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


def printable(text: str) -> str:
    """One line of text in which control characters, and those that turn its direction, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
