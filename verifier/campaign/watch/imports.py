"""Files of this package that a part of it may import, read from the sources: what a process that runs it may hold."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def reached(files: Iterable[Path]) -> set[Path]:
    """These files, and all of the package that they import, now or inside of a function, directly or not."""
    found: set[Path] = set()
    left = list(files)
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imported(file)
    return found


def _imported(file: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError):
        return
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            block.body = []  # never imported
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{item.name}" for item in node.names)]
        elif isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # "package.module:function"
            names = [node.value.partition(":")[0]]
        for name in names:
            yield from _files(name)


def _files(name: str) -> Iterator[Path]:
    """Files that importing a module of the package runs: its own, and those of the packages above it."""
    first, *rest = name.split(".")
    if first != _PACKAGE.name or not all(part.isidentifier() for part in rest):
        return
    path = _PACKAGE
    for part in (None, *rest):
        path = path / part if part else path
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file
