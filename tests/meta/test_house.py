"""Laws of names and docstrings over the whole package, and of what tests write."""

import ast
import re

import pytest

from tests.meta.sources import ROOT, python_files, tree_of, where

DANGLING = re.compile(r"(Of|By|What|Where|Whether|How|As|Which|Who|That|Those|Than|With)\b(?! a [a-z]+ of)")
"""First words of a docstring that is no noun phrase and no sentence by itself."""
TO_DOCS = re.compile(r"""PAGE\.write_|["']docs["'].*(write_text|write_bytes|open\(["']w)""")


def docstrings(tree: ast.Module):
    """(line, text) of the docstrings of modules, classes and functions, and of the strings below attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            heads = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and place == 0
            follows = place > 0 and isinstance(body[place - 1], ast.Assign | ast.AnnAssign)
            if (heads or follows) and isinstance(statement.value.value, str):
                yield statement.lineno, statement.value.value


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in (ROOT / "verifier").glob("*/__init__.py")))
def test_docstrings_begin_with_a_noun_or_a_verb(folder):
    dangling = [
        f"{where(path, line)}: {text.strip().splitlines()[0]}"
        for path in python_files(f"verifier/{folder}")
        for line, text in docstrings(tree_of(path))
        if text.strip() and DANGLING.match(text.strip())
    ]
    assert not dangling, "\n".join(dangling)


def test_no_test_writes_into_docs():
    """A test measures; a command draws the page."""
    tests = [path for path in python_files("tests") if path.name.startswith(("test_", "conftest"))]
    found = [where(path) for path in tests if path.name != "test_house.py" and TO_DOCS.search(path.read_text())]
    assert not found, "\n".join(found)
