"""Checks that judge a recorded loop: each holds on the right one, and is violated by one wrong thing in its stage."""

from __future__ import annotations

from pathlib import Path

import pytest

import verifier.checks  # noqa: F401 - fills the registry
from tests.unit.probe.whole_loop import Loop
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.report import Report, render_text, report_of

FAULTS = [
    "ADV001", "ADV002", "ADV003", "ADV004", "CFG001", "CKP001", "CKP004", "DAT004", "DAT007", "DAT008", "DAT009", "DAT011",
    "DAT014", "DAT015", "ENG001", "ENG002", "ENG003", "ENG004", "ENG005", "ENG007", "ENG009", "ENG010", "LGP006",
    "LGP008", "LGP009", "LGP010", "LGP011", "LGP013", "LGP015", "LGP017", "LSS003", "LSS004", "PCK001", "PCK002", "PCK004",
    "PLN002", "RPL001", "RWD001", "TPT001", "TPT002", "TPT003", "TRN002", "TRN003", "TRN005", "TRN006", "WGT001", "WGT004",
    "WGT005", "WGT008", "WGT009", "WGT010", "WGT011", "WGT014", "WGT015", "WGT016", "WGT019", "WGT021",
]  # fmt: skip


def judged(folder: Path, fault: str = "") -> Report:
    Loop(folder, fault).run(folder / "trace")
    return report_of(read(folder / "trace"), "trace")


def test_a_right_loop_holds_in_all_that_it_hands_over(tmp_path: Path) -> None:
    report = judged(tmp_path)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} >= {*FAULTS}


@pytest.mark.parametrize("code", FAULTS)
def test_one_wrong_thing_is_seen(code: str, tmp_path: Path) -> None:
    report = judged(tmp_path, code)
    assert code in [item.code for item in report.violated], render_text(report)
