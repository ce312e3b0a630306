"""The repository's files and imports, as the laws in this folder read them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[Path]:
    """Every file under version control, or that would be if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    return [path for name in sorted(set(listed.split("\0")) - {""}) if (path := ROOT / name).is_file()]


def python_files(folder: str = "") -> list[Path]:
    """Tracked Python files under a folder of the repository."""
    return [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(ROOT / folder)]


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
