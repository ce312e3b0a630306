"""The known bugs of vLLM's weight reload: which the installed vLLM has, and that the fixes mend those.

A fact as shipped that fails says that upstream is mended: the fix of the same issue in
`verifier/platform/upstream_fixes_vllm.py` has to go, and what upstream's own mend brings with it (the fact's docstring
tells) has to be looked at.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

FACTS_FILE = Path(__file__).with_name("reload_facts.py")
FACTS = [
    name.id
    for node in ast.parse(FACTS_FILE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("AS_SHIPPED", "FIXED")
    for name in node.value.elts
]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contracts.reload_facts"],
        cwd=FACTS_FILE.parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_facts_are_there():
    assert len(FACTS) > 5


@pytest.mark.parametrize("fact", FACTS)
def test_fact(fact, said):
    assert not said[fact], said[fact]
