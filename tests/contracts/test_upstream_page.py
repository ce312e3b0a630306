"""Each section below "Bugs" of docs/upstream.md shows its bug in the installed packages.

When one fails, upstream is mended: the section goes, and so does what the package does because of the bug.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from verifier.platform.provenance import PINS

PAGE = Path(__file__).parents[2] / "docs" / "upstream.md"
_SECTION = re.compile(r"^### (.+?)\n\n(.*?)```python\n(.*?)```$", re.DOTALL | re.MULTILINE)
TEXT = PAGE.read_text(encoding="utf-8").partition("\n## Bugs\n")[2]
BEFORE, *SECTIONS = _SECTION.findall(TEXT)
_RUN = """
import json, sys, traceback
before, sections = json.load(sys.stdin)
found, shared = {}, {}
exec(before, shared)
for title, code in sections:
    try:
        exec(code, dict(shared))
    except Exception:
        found[title] = traceback.format_exc()
print(json.dumps(found))
"""


@cache
def failures() -> dict[str, str]:
    """Traceback of each section that fails, by title, of one process that runs them all."""
    asked = json.dumps([BEFORE[2], [(title, code) for title, _, code in SECTIONS]])
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=asked, capture_output=True, text=True, timeout=300, check=False, env=one
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_section_has_code():
    assert [title for title, _, _ in (BEFORE, *SECTIONS)] == re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert all("assert " in code for _, _, code in SECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("title", "text"), [section[:2] for section in SECTIONS], ids=lambda item: item[:40])
def test_section_names_a_verified_version_and_shows_its_bug(title, text):
    package, version = text.split(maxsplit=2)[:2]
    assert PINS[package] == version.rstrip(".,")
    assert title not in failures(), failures()[title]
