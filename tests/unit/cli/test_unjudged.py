"""Last line of a judged training run: what no check judged."""

from types import SimpleNamespace

import pytest

from verifier.cli.train import _unjudged

LINE = "not judged: LGP009 (no noise is known)"


@pytest.mark.parametrize(
    ("not_judged", "line"),
    [
        ({}, "not judged: nothing that this run has\n"),
        ({LINE: 40}, f"{LINE}\n"),
        ({LINE: 8, "not judged: LGP015 (no evaluation)": 40}, f"{LINE} (8 of 40 steps); LGP015 (no evaluation)\n"),
    ],
)
def test_each_reason_is_said_once_with_its_steps(not_judged: dict[str, int], line: str) -> None:
    assert _unjudged(SimpleNamespace(judged=40, not_judged=not_judged)) == line


def test_a_run_that_nobody_judged_says_nothing() -> None:
    assert _unjudged(None) == ""
