"""Rounds of `--watch` in words, and what is refused before the first."""

from __future__ import annotations

import pytest

from verifier.cli import watch
from verifier.cli.app import run

GOLDEN = ["golden", "--model", "tiny:qwen3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--watch", "--json", "-"], "--watch prints the text of each round"),
        (["--watch", "--record", "--why", "new"], "--watch would record a manifest in each round"),
        (["--watch", "--watch-path", "absent"], "--watch-path names `absent`, which does not exist"),
        (["--watch-path", "."], "--watch-path goes with --watch"),
    ],
)
def test_what_makes_no_sense_in_rounds_is_refused_in_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run([*GOLDEN, *words]) == 4
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "traces").exists()


def test_news_name_what_changed_since_the_last_round_that_judged():
    before, now = {"A": "holds", "B": "violated", "C": "holds"}, {"A": "violated", "B": "holds"}
    assert watch._news(before, now) == "; newly violated: A; newly holds: B; newly not judged: C"
    assert watch._news(before, before) == "; no verdict changed"
    assert watch._news({}, now) == ""
    assert watch._news(before, {}) == "; nothing was judged"


def test_a_round_gets_the_words_of_the_command_alone():
    words = [*GOLDEN, "--watch", "--watch-path", "a", "--watch-path=b", "-q"]
    assert watch._without_watch(words) == [*GOLDEN, "-q"]
