"""Waivers, by day, check, family and model; and the decision that cells come to."""

from __future__ import annotations

import datetime

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.unit.campaign.gate_cases import CELL, FAULT, ROWS, finding, violated, waiver
from verifier.campaign.gate.decision import decided, require_known_waivers, waived
from verifier.config import Waiver
from verifier.errors import UsageError
from verifier.report.gate_result import CellResult, GateFinding

LAST_DAY = datetime.date(2027, 1, 31)
HOLDS = CellResult(cell=replace(CELL, id="another"), status="holds")


def decide(*cells: CellResult, waivers: tuple[Waiver, ...] = (), today: datetime.date = LAST_DAY):
    marked, uses = waived(cells, waivers, today)
    return (*decided(marked, uses), marked, uses)


def test_all_hold():
    decision, reasons, stage, _, _ = decide(HOLDS)
    assert (decision, reasons, stage) == ("PASS", [], "")


def test_a_model_without_a_run_of_its_own_does_not_pass():
    """As by `--mesh tp=2` where 2 does not divide its heads; a caught fault is a run of the machine."""
    fault = CellResult(cell=FAULT, status="holds")
    decision, reasons, _ = decided([HOLDS, fault], [], [HOLDS.cell.model, "published:smollm2-135m"])
    lack = "the matrix has no run of published:smollm2-135m: see what is left out"
    assert (decision, reasons) == ("INCONCLUSIVE", [lack])
    assert decided([fault], [], ["published:smollm2-135m"])[:2] == ("INCONCLUSIVE", [lack])


def test_a_violation_fails_the_gate_and_names_the_first_bad_stage_of_all():
    late = violated(finding("ENG001", "engine", (1, 1, 13)), cell=replace(CELL, id="late"))
    decision, reasons, stage, _, _ = decide(late, violated(), HOLDS)
    assert (decision, stage) == ("FAIL", "load")
    assert reasons == [
        "late is violated, first in engine: ENG001 tensor-differs: 6 of 40 tensors differ",
        f"{CELL.id} is violated, first in load: WGT001 tensor-differs: 6 of 40 tensors differ",
    ]


def test_the_stage_of_a_waived_violation_is_not_named():
    both = violated(finding(), finding("ENG001", "engine", (1, 1, 13)))
    decision, reasons, stage, _, _ = decide(both, waivers=(waiver(),))
    assert (decision, stage) == ("FAIL", "engine")
    assert reasons == [f"{CELL.id} is violated, first in engine: ENG001 tensor-differs: 6 of 40 tensors differ"]


@pytest.mark.parametrize("by", [{}, {"family": "", "model": "tiny:nemotron-h"}], ids=["family", "model"])
def test_a_waiver_waives_until_its_last_day(by):
    decision, reasons, stage, (cell, _), (use,) = decide(violated(), HOLDS, waivers=(waiver(**by),))
    assert (decision, reasons, stage, cell.waived) == ("PASS", [], "", True)
    assert (use.num_waived, use.num_expired, use.expired) == (1, 0, False)


def test_an_expired_waiver_waives_nothing_and_is_said():
    day = LAST_DAY + datetime.timedelta(days=1)
    decision, reasons, _, (cell,), (use,) = decide(violated(), waivers=(waiver(),), today=day)
    assert (decision, cell.waived, use.num_waived, use.num_expired) == ("FAIL", False, 0, 1)
    assert reasons[-1] == "the waiver of WGT001 expired on 2027-01-31 and waives nothing"


def test_of_two_waivers_the_one_that_has_not_expired_counts():
    decision, _, _, _, uses = decide(violated(), waivers=(waiver(until="2026-01-01"), waiver(owner="bob")))
    assert (decision, [use.num_waived for use in uses]) == ("PASS", [0, 1])


@pytest.mark.parametrize(
    "other", [{"check": "WGT004"}, {"family": "qwen3"}, {"family": "", "model": "tiny:qwen3"}], ids=str
)
def test_a_waiver_of_something_else_matches_nothing(other):
    decision, _, _, _, (use,) = decide(violated(), waivers=(waiver(**other),))
    assert (decision, use.num_waived, use.num_expired) == ("FAIL", 0, 0)


def test_one_waived_violation_does_not_waive_another():
    both = violated(finding(), finding("ENG001", "engine", (0, 1, 13)))
    decision, reasons, stage, (cell,), _ = decide(both, waivers=(waiver(),))
    assert (decision, stage, cell.waived, len(reasons)) == ("FAIL", "engine", False, 1)


def test_a_check_that_could_not_be_judged_beside_waived_ones_leaves_a_doubt():
    unsure = GateFinding(check="LGP001", name="x", sentence="LGP001 x: nothing recorded", text="", violated=False)
    decision, reasons, _, _, _ = decide(violated(finding(), unsure), waivers=(waiver(),))
    assert (decision, reasons) == ("INCONCLUSIVE", [f"{CELL.id} was not judged whole beside its waived violations"])


@pytest.mark.parametrize("status", ["inconclusive", "not run"])
def test_what_was_not_judged_is_inconclusive(status):
    decision, reasons, _, _, _ = decide(HOLDS, CellResult(cell=CELL, status=status, reason="no room\nmore"))
    assert decision == "INCONCLUSIVE"
    assert reasons[0].endswith(": no room")


def test_no_cell_is_inconclusive():
    assert decide()[0] == "INCONCLUSIVE"


def test_a_violation_outweighs_a_doubt():
    assert decide(violated(), CellResult(cell=HOLDS.cell, status="not run", reason="budget"))[0] == "FAIL"


def test_a_failed_run_fails_the_gate_and_no_waiver_covers_it():
    failed = CellResult(cell=CELL, status="failed", reason="its process ended: killed by SIGKILL")
    decision, reasons, _, _, _ = decide(failed, waivers=(waiver(),))
    assert (decision, reasons) == ("FAIL", [f"{CELL.id} failed: its process ended: killed by SIGKILL"])


def test_a_fault_that_is_not_caught_fails_the_gate():
    missed = CellResult(cell=FAULT, status="violated", reason="TRN001 did not catch it")
    decision, reasons, stage, _, _ = decide(missed, HOLDS)
    assert (decision, stage) == ("FAIL", "")
    assert reasons == ["faults step-dropped was not caught, so the checks are not alive here: TRN001 did not catch it"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"until": "soon"}, "the waiver of WGT001 has until `soon`: write a day, such as 2027-01-31"),
        ({"model": "tiny:qwen3"}, "the waiver of WGT001 has both family and model: give one of the two"),
        ({"family": ""}, "the waiver of WGT001 has neither family nor model: give one of the two"),
        *(
            ({name: " "}, f" has no `{name}`: a waiver has check, family or model, issue, owner, reason and until")
            for name in ("check", "issue", "owner", "reason", "until")
        ),
    ],
)  # fmt: skip
def test_a_waiver_that_says_too_little_is_refused(changed, said):
    with pytest.raises(UsageError) as refused:
        Waiver(**{**ROWS, **changed})
    assert str(refused.value).endswith(said)


def test_unknown_checks_and_families_are_refused():
    require_known_waivers([waiver(), waiver(family="gemma4_text")], {"gemma4_text"})
    with pytest.raises(UsageError, match="a waiver names check `WGT01`, which there is not"):
        require_known_waivers([waiver(check="WGT01")], set())
    with pytest.raises(UsageError, match="names family `nemotron`, it must be one of deepseek-v3, llama"):
        require_known_waivers([waiver(family="nemotron")], set())
