"""The kill matrix shows what is caught, what is not, and which check nothing broke."""

import json

from verifier.report.matrix import TrialRow, render_matrix, render_trials, render_trials_json, unbroken, uncaught

CAUGHT = TrialRow(
    fault="expert-swapped",
    stage="export",
    reproduces="repo#1",
    expected=("WGT004",),
    violated=("LGP002", "WGT004"),
    seconds=3.14,
)
MISSED = TrialRow(
    fault="bias-rounded", stage="engine", reproduces="repo#2", expected=("ENG001",), violated=(),
    problems=("no check saw it: ENG001 holds",), seconds=2.0,
)  # fmt: skip
CODES = ["WGT004", "LGP002", "ENG001"]


def test_what_is_missing():
    assert uncaught([CAUGHT, MISSED]) == ["bias-rounded"]
    assert unbroken([CAUGHT, MISSED], CODES) == ["ENG001"]


def test_matrix():
    assert render_matrix([CAUGHT, MISSED], CODES) == (
        "| fault | stage | re-enacts | ENG001 | LGP002 | WGT004 |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `expert-swapped` | export | repo#1 |  | x | X |\n"
        "| `bias-rounded` | engine | repo#2 |  |  |  |\n"
        "\nCaught by nobody: `bias-rounded`.\n"
        "\nBroken by no fault: `ENG001`.\n"
    )


def test_trials():
    assert render_trials([CAUGHT, MISSED]) == (
        "  caught  expert-swapped  export     3.1 s  LGP002 WGT004\n"
        "  FAILED  bias-rounded    engine     2.0 s  -\n"
        "\nbias-rounded: no check saw it: ENG001 holds\n"
        "\n1 of 2 faults are caught in the right stage\n"
    )


def test_json_is_whole():
    assert [row["passed"] for row in json.loads(render_trials_json([CAUGHT, MISSED]))] == [True, False]
