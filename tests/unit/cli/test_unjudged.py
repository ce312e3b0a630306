"""Last line of a judged training run: what no check judged."""

from types import SimpleNamespace

import pytest

from verifier.cli.train import _unjudged


@pytest.mark.parametrize(
    ("judged", "not_judged", "line"),
    [
        (0, {}, ""),
        (3, {}, "not judged: nothing that this run has\n"),
        (3, {"shards were not judged: no layout": 3, "no noise": 1},
         "not judged: shards were not judged: no layout; no noise (1 of 3 steps)\n"),
    ],
)  # fmt: skip
def test_the_last_line_says_what_was_not_judged_and_in_how_many_steps(judged, not_judged, line):
    assert _unjudged(SimpleNamespace(judged=judged, not_judged=not_judged)) == line
