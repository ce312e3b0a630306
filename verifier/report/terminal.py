"""A report on a terminal: lines folded at its width, and verdicts in colour; a file gets the text as it is."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from typing import TextIO

LEAST_WIDTH = 40
"""Narrower than that, lines are left alone."""
_LABEL = re.compile(r" *(?:[\w -]{1,10}: +)?")
"""Margin of a line and its label: what follows is folded to stand below itself."""
_WHOLE = re.compile(r" *(replay|command) *: ")
"""Lines to copy, which no break may cut."""
_COLOURS = {"VIOLATED": "31", "violated": "31", "INCONCLUSIVE": "33", "inconclusive": "33", "holds": "32", "cause": "1"}
_WORDS = re.compile(r"^( *)(" + "|".join(_COLOURS) + r")(?= {2}|:)", re.MULTILINE)


def for_terminal(text: str, stream: TextIO) -> str:
    """Fold and colour a report for a stream, if that is a terminal; NO_COLOR (no-color.org) leaves the colours out."""
    if not stream.isatty():
        return text
    text = folded(text, shutil.get_terminal_size().columns)
    return text if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else coloured(text)


def folded(text: str, width: int) -> str:
    """Fold every line at a width, in columns, between words; what is longer than a line stays whole."""
    if width < LEAST_WIDTH:
        return text
    return "\n".join(line if _WHOLE.match(line) else _fold(line, width) for line in text.split("\n"))


def _fold(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    found = _LABEL.match(line)
    margin = " " * max(found.end() if found else 0, 2)
    return textwrap.fill(
        line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


def coloured(text: str) -> str:
    """Colour the verdict at the beginning of each line that has one."""
    return _WORDS.sub(lambda found: f"{found[1]}\x1b[{_COLOURS[found[2]]}m{found[2]}\x1b[0m", text)
