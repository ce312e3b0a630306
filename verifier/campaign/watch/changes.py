"""Watched files: which there are, which changed, and which of them Python cannot compile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

Stamp = tuple[int, int]
"""Time of the last change, ns, and bytes of a file."""
LOOK_S = 0.3
"""Seconds between two looks at all files."""


def stamps(roots: Iterable[Path]) -> dict[Path, Stamp]:
    """Stamp of each file under these files and folders; of links, what they lead to.

    Left out are hidden files, backups of editors (``name~``) and Python's caches. A root that is gone has no files.
    """
    found: dict[Path, Stamp] = {}
    for root in roots:
        if root.is_dir():
            found.update(_under(str(root)))
        else:
            found.update(_stamp(str(root)))
    return found


def _under(folder: str) -> Iterator[tuple[Path, Stamp]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # it has gone away meanwhile
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith("~") or entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _under(entry.path)
        else:
            yield from _stamp(entry.path)


def _stamp(path: str) -> Iterator[tuple[Path, Stamp]]:
    try:
        status = os.stat(path)
    except OSError:
        return
    yield Path(path), (status.st_mtime_ns, status.st_size)


def changed(before: Mapping[Path, Stamp], after: Mapping[Path, Stamp]) -> list[Path]:
    """Files that were written, made or removed between two looks, sorted."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def next_change(
    before: Mapping[Path, Stamp], look: Callable[[], dict[Path, Stamp]], sleep: Callable[[float], None] = time.sleep
) -> tuple[list[Path], dict[Path, Stamp]]:
    """Wait until files differ from `before` and then rest for one look, so that an edit of several is one change.

    Returns:
        The changed files, and the stamps of all.
    """
    seen = look()
    while True:
        found = changed(before, seen)
        sleep(LOOK_S)
        again = look()
        if found and again == seen:
            return found, again
        seen = again


def syntax_errors(files: Collection[Path]) -> list[str]:
    """A sentence for each of these Python files that cannot be compiled; files that are gone have none."""
    found = []
    for file in files:
        if file.suffix != ".py" or not file.is_file():
            continue
        try:
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        except SyntaxError as problem:
            found.append(f"`{file}`, line {problem.lineno}: {problem.msg}")
        except (OSError, ValueError) as problem:
            found.append(f"`{file}`: {problem}")
    return found
