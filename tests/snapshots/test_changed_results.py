"""Two results beside each other: what got worse, what got better, what moved, and the exit code."""

import json

from msgspec.structs import replace

from tests.snapshots.check_traces import BROKEN, clean
from tests.unit.campaign.gate_cases import CELL, violated
from tests.unit.campaign.test_gate_data import made
from tests.unit.report.test_live_and_replayed import stored
from verifier.cli.app import run
from verifier.core.outputs import json_text
from verifier.report.gate_result import CellResult, CheckVerdict


def checks(*verdicts, compared=40):
    names = ("WGT001", "ENG001")
    return tuple(
        CheckVerdict(code=code, name="tensor-differs", verdict=verdict, num_compared=compared)
        for code, verdict in zip(names, verdicts, strict=True)
    )


def pair(tmp_path, old, new):
    """Files of two gates with these cells, and decisions that go with them."""
    files = []
    for name, cells, decision in (("old", old, "PASS"), ("new", new, "FAIL")):
        result = replace(
            made(), cells=tuple(cells), decision=decision, waivers=(), versions={"torch": f"2.{len(files)}"}
        )
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json_text(result))
    return [str(file) for file in files]


def test_text_of_a_gate_that_got_worse(tmp_path, capsys, same_as_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held = CellResult(cell=CELL, status="holds", checks=checks("holds", "violated"), findings=violated().findings)
    worse = violated(checks=checks("violated", "holds", compared=30))
    gone = CellResult(cell=replace(CELL, id="gone"), status="holds")
    mended = replace(CELL, id="mended")
    old = [held, gone, CellResult(cell=mended, status="failed", reason="it died")]
    pair(tmp_path, old, [worse, CellResult(cell=mended, status="holds")])
    assert run(["report", "compare", "old.json", "new.json"]) == 1
    same_as_file("compare-gates.txt", capsys.readouterr().out)
    assert run(["report", "compare", "old.json", "new.json", "--json", "-"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["worse"] is True
    assert [(item["cell"], item["check"], item["after"]) for item in said["verdicts"]] == [
        (CELL.id, "", "violated"), (CELL.id, "ENG001", "holds"), (CELL.id, "WGT001", "violated"),
        ("gone", "", "not run"), ("mended", "", "holds"),
    ]  # fmt: skip


def test_the_same_result_twice_is_no_change(tmp_path, capsys):
    cells = [CellResult(cell=CELL, status="holds", checks=checks("holds", "holds"))]
    old, _ = pair(tmp_path, cells, cells)
    assert run(["report", "compare", old, old]) == 0
    assert capsys.readouterr().out.endswith("PASS as before; 2 checks of cells before, 2 after; nothing got worse\n")


def test_a_violation_that_is_newly_waived_got_worse_and_an_expired_waiver_too(tmp_path):
    held, bad = CellResult(cell=CELL, status="holds"), violated()
    gate = replace(made(), decision="PASS", waivers=())
    files = {}
    for name, cell in {"held": held, "waived": replace(bad, waived=True), "violated": bad}.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json_text(replace(gate, cells=(cell,))))
    order = [str(files[name]) for name in ("held", "waived", "violated")]
    for before in range(3):
        for after in range(3):
            assert run(["report", "compare", order[before], order[after]]) == int(after > before)


def test_two_traces_are_compared_check_by_check(tmp_path, capsys):
    stored(tmp_path / "old", clean())
    stored(tmp_path / "new", BROKEN["LGP001"])
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert run(["report", "compare", old, new]) == 1
    said = capsys.readouterr().out
    assert "LGP001 holds -> violated: LGP001 trainer-logprob-differs-from-oracle" in said
    assert "trainer against engine, `" in said
    assert run(["report", "compare", new, old]) == 0
    assert "LGP001 violated -> holds" in capsys.readouterr().out


def test_a_gate_and_a_trace_are_not_compared(tmp_path, capsys):
    stored(tmp_path / "t", clean())
    (tmp_path / "g.json").write_text(json_text(made()))
    assert run(["report", "compare", str(tmp_path / "t"), str(tmp_path / "g.json")]) == 4
    assert "give two of a kind" in capsys.readouterr().err
    assert run(["report", "compare", str(tmp_path / "none"), str(tmp_path / "g.json")]) == 4
