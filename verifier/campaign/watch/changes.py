"""Watched files: which there are, which changed, and which of them Python cannot compile."""

from __future__ import annotations

import contextlib
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
        for file in _under(str(root)) if root.is_dir() else [str(root)]:
            with contextlib.suppress(OSError):  # it has gone away meanwhile
                status = os.stat(file)
                found[Path(file)] = status.st_mtime_ns, status.st_size
    return found


def _under(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = filter(_counts, folders)
        yield from (os.path.join(folder, name) for name in filter(_counts, names))


def _counts(name: str) -> bool:
    return not name.startswith(".") and not name.endswith("~") and name != "__pycache__"


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
