"""A terminal gets folded lines and colours; a file gets the text to the byte."""

import io

import pytest

from tests.snapshots.reports import REPORTS
from verifier.report import for_terminal, render_text
from verifier.report.render_text import LEAST_WIDTH, coloured, folded

TEXT = render_text(REPORTS["mixed"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [LEAST_WIDTH, 60, 80, 200])
def test_lines_fit_and_no_word_is_lost(width):
    text = folded(TEXT, width)
    assert text.split() == TEXT.split()
    for line in text.splitlines():
        assert len(line) <= width or max(map(len, line.split())) > width - 14 or "replay" in line or "command" in line


def test_a_command_to_copy_stays_whole():
    commands = [line for line in TEXT.splitlines() if "verifier replay" in line]
    assert commands
    assert set(commands) <= set(folded(TEXT, 60).splitlines())


def test_a_file_and_a_narrow_terminal_are_left_alone():
    assert for_terminal(TEXT, io.StringIO()) == TEXT
    assert folded(TEXT, LEAST_WIDTH - 1) == TEXT


def test_colours_and_no_colours(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = for_terminal(TEXT, Terminal())
    assert "\n  \x1b[31mVIOLATED\x1b[0m      ENG001" in text
    assert "\n\x1b[31mviolated\x1b[0m: 2 of 5 checks" in text
    assert "\n\x1b[1mcause\x1b[0m: LGP002" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert for_terminal(TEXT, Terminal()) == TEXT


def test_only_the_beginning_of_a_line_is_coloured():
    assert coloured("a tensor holds: 3\n") == "a tensor holds: 3\n"
