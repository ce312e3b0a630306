"""docs/upstream.md is drawn from the rows in golden/, and tells of every fix that there is."""

from __future__ import annotations

from tests.dist.as_shipped import BEGIN, END, PAGE, rows, table
from verifier.platform.upstream_fixes import FIXES


def test_table_is_what_the_rows_say():
    drawn = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END, maxsplit=1)[0]
    assert drawn == table(rows())


def test_every_fix_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for fix in FIXES.values():
        assert f"| `{fix.id}` |" in text
        assert not fix.checks or ", ".join(fix.checks) in text
