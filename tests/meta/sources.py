"""The repository's files and imports, as the laws in this folder read them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def tracked() -> tuple[Path, ...]:
    """Every file under version control, or that would be if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    return tuple(path for name in sorted(set(listed.split("\0")) - {""}) if (path := ROOT / name).is_file())


def python_files(folder: str = "") -> list[Path]:
    """Tracked Python files under a folder of the repository."""
    return [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(ROOT / folder)]


@cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of every import in a file, wherever in it; relative ones do not occur here."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            module = node.module or ""
            if module == "verifier":
                for alias in node.names:
                    yield f"verifier.{alias.name}", node.lineno
            else:
                yield module, node.lineno


def where(path: Path, line: int | None = None) -> str:
    """A place, as it is printed in a failure."""
    name = str(path.relative_to(ROOT))
    return name if line is None else f"{name}:{line}"


def module_of(path: Path) -> str:
    """Dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_to_run(path: Path) -> Iterator[str]:
    """Names that a file imports at any time: `a.b` and `a.b.c` of `from a.b import c`; none for types only."""
    waiting: list[ast.stmt] = list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def import_graph(folder: str) -> dict[str, set[str]]:
    """Module -> modules of the same folder that it imports, in a function too."""
    files = {module_of(path): path for path in python_files(folder)}
    return {name: {found for found in imports_to_run(path) if found in files} - {name} for name, path in files.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, each sorted."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in graph}
    groups = {tuple(sorted({name} | {other for other in reach[name] if name in reach[other]})) for name in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]
