"""Tables of docs/whats-here.md: `python -m tests.meta.whats_here` draws them from the docstrings of the modules."""

from __future__ import annotations

import ast
import re

from tests.meta.sources import ROOT, python_files, tree_of

PAGE = ROOT / "docs" / "whats-here.md"
TABLE = re.compile(r"(<!-- modules: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""Place of a table, with the folder that it lists."""


def table(folder: str) -> str:
    """One row per module of a folder and of the folders in it; of `verifier` alone, its own modules."""
    files = [path for path in python_files(folder) if path.name != "__init__.py"]
    if folder == "verifier":
        files = [path for path in files if path.parent == ROOT / folder]
    rows = [f"| `{path.relative_to(ROOT)}` | {summary(path)} |" for path in files]
    return "\n".join(["| module | content |", "| --- | --- |", *rows]) + "\n"


def summary(path) -> str:
    """First line of a module's docstring."""
    return (ast.get_docstring(tree_of(path)) or "").partition("\n")[0].replace("|", r"\|")


def drawn(page: str) -> str:
    """The page's text with its tables drawn anew."""
    return TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
