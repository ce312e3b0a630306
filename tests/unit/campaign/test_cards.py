"""Verification cards: what of a gate is in one, and each answer of `verifier gate --check-card`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.unit.campaign.gate_cases import CELL, finding, violated
from tests.unit.campaign.test_gate_data import made
from verifier import __version__
from verifier.campaign.gate.card import Card, card_of, write_cards
from verifier.cli.app import run
from verifier.core.outputs import json_text
from verifier.platform.provenance import installed_versions
from verifier.report.gate_result import CellResult, CheckVerdict, GateResult, LeftOut

MODEL = "tiny:nemotron-h"
HELD = CellResult(
    cell=CELL, status="holds", checks=(CheckVerdict(code="WGT001", name="x", verdict="holds", num_compared=40),)
)


def gate(*cells: CellResult, **changed) -> GateResult:
    """A gate that passed here, without waivers."""
    values = {"verifier": __version__, "versions": installed_versions(), "waivers": (), "left_out": ()}
    return replace(made(), cells=cells or (HELD,), **{**values, **changed})


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Write the card of a gate, and check it: exit code and what was said."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def checked(result: GateResult, *words: str, model: str = MODEL) -> tuple[int, str]:
        write_cards(result, tmp_path)
        code = run(["gate", "--model", model, "--check-card", str(tmp_path / "cards" / "tiny-nemotron-h.json"), *words])
        captured = capsys.readouterr()
        said = captured.out + captured.err
        assert said.count("\n") == 1
        return code, said

    return checked


def test_a_card_has_the_runs_of_its_model_alone_and_the_injected_faults():
    other = replace(CELL, id="other", model="tiny:qwen3", family="qwen3")
    left_out = (LeftOut(what=f"{MODEL}, engine vllm", reason="no kernels"), LeftOut(what="tiny:qwen3", reason="no"))
    result = replace(made(), models=(MODEL, "tiny:qwen3"), left_out=left_out)
    card = card_of(replace(result, cells=(*result.cells, violated(cell=other))), MODEL)
    assert card.runs == {
        CELL.id: "violated", "waived one": "waived", "faults step-dropped": "holds",
        "golden tiny:nemotron-h bf16 tp2": "not run", "dead, 1": "failed", "unsure": "inconclusive",
    }  # fmt: skip
    assert (card.decision, card.family, card.meshes, card.engines) == ("FAIL", "nemotron-h", ("1 rank",), ("hf",))
    assert card.not_judged == (f"{MODEL}, engine vllm: no kernels",)


def test_a_card_names_what_is_wrong_once_with_its_bug_its_waiver_and_its_runs():
    bug = "miles #975; run again with `--fix miles-975` to see what is left"
    known = [replace(finding(code), known_bug=bug) for code in ("WGT001", "WGT004")]
    cells = [violated(*known, finding("TRN001"), cell=replace(CELL, id=name)) for name in ("first", "second")]
    dead = CellResult(cell=replace(CELL, id="dead"), status="failed", reason="it ended\nlast line")
    explained, unexplained, died = card_of(gate(*cells, dead), MODEL).wrong
    assert (explained.bug, explained.checks, explained.runs) == (bug, ("WGT001", "WGT004"), ("first", "second"))
    assert (unexplained.bug, unexplained.checks, unexplained.waived) == ("", ("TRN001",), False)
    assert (died.bug, died.checks, died.sentence, died.runs) == ("", (), "it ended", ("dead",))
    waived = [item for item in card_of(made(), MODEL).wrong if item.waived]
    assert [(item.checks, item.runs) for item in waived] == [(("WGT004",), ("waived one",))]


def test_a_check_holds_on_a_card_if_it_holds_in_every_run():
    bad = CheckVerdict(code="WGT001", name="x", verdict="violated", num_compared=2)
    good = CheckVerdict(code="ENG001", name="y", verdict="holds", num_compared=3)
    assert card_of(gate(), MODEL).holds == {"WGT001": 40}
    assert card_of(gate(HELD, violated(checks=(bad, good))), MODEL).holds == {"ENG001": 3}


def test_a_card_comes_back_from_its_file(tmp_path):
    write_cards(made(), tmp_path)
    (file,) = (tmp_path / "cards").iterdir()
    assert msgspec.json.decode(file.read_bytes(), type=Card) == card_of(made(), MODEL)


def test_a_card_that_passed_fits_its_model_in_the_same_environment(check):
    assert check(gate()) == (0, f"PASS on 2026-11-26: {MODEL}, with the versions that are here\n")
    assert check(gate(), "--mesh", "tp=1", "--dtype", "bf16", "--engine", "hf")[0] == 0


def test_a_folder_with_the_same_config_fits_wherever_it_lies_and_another_does_not(check, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    write_cards(replace(gate(), models=(str(folder),)), tmp_path)
    (card,) = (tmp_path / "cards").iterdir()
    moved = folder.rename(tmp_path / "moved")
    (moved / "config.json").write_text(json.dumps(config, indent=3))
    assert run(["gate", "--model", str(moved), "--check-card", str(card)]) == 2  # no run of it was made
    (moved / "config.json").write_text(json.dumps({**config, "hidden_size": 9}))
    assert run(["gate", "--model", str(moved), "--check-card", str(card)]) == 4


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (gate(violated()), f"FAIL on 2026-11-26: {CELL.id} is violated, first in load: WGT001"),
        (gate(replace(HELD, status="failed", reason="it hung")), "FAIL on 2026-11-26: "),
        (gate(ended=""), "FAIL: the gate that began at 2026-11-26T10:00:00Z was broken off"),
    ],
    ids=["violated", "died", "broken-off"],
)
def test_a_card_that_failed_or_was_broken_off_is_code_1(check, result, sentence):
    code, said = check(result)
    assert (code, said.startswith(sentence)) == (1, True), said


def test_a_waiver_that_has_ended_since_is_code_1(check):
    use = replace(made().waivers[0], num_waived=1, until="2020-01-01")
    assert check(gate(waivers=(use,))) == (1, "FAIL on 2026-11-26: the waiver of WGT004 ended on 2020-01-01\n")
    assert check(gate(waivers=(replace(use, until="2999-01-01"),)))[0] == 0


@pytest.mark.parametrize(
    ("result", "words", "clause"),
    [
        (gate(versions={**installed_versions(), "torch": "1.0"}), (), "the card has torch 1.0, here it is 2."),
        (gate(versions={**installed_versions(), "vllm": "0.1"}), (), "the card has vllm 0.1, here it is absent"),
        (gate(verifier="0.0.1"), (), f"the card has verifier 0.0.1, here it is {__version__}"),
        (gate(tier="cuda", gpus=("H200", "H200")), (), "the card is of cuda, H200, this is cpu"),
        (gate(fixes=("miles-975",)), (), "the card has fixes miles-975, asked for are none"),
        (gate(), ("--mesh", "tp=2"), "the card has no run of mesh tp2"),
        (gate(), ("--engine", "vllm,tp=2"), "the card has no run of engine vllm,tp=2"),
        (gate(), ("--dtype", "fp32"), "the card has no run of dtype float32"),
        (gate(replace(HELD, status="not run", reason="no budget")), (), "was not run: no budget"),
    ],
)
def test_a_card_that_does_not_speak_for_what_is_asked_is_code_2(check, result, words, clause):
    code, said = check(result, *words)
    assert (code, said.startswith("INCONCLUSIVE: "), clause in said) == (2, True, True), said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        ("not json", "is not a card that `verifier gate` writes: JSON is malformed"),
        (
            json_text(card_of(made(), MODEL))[:-20],
            "is not a card that `verifier gate` writes: Input data was truncated",
        ),
        ('{"format": 2}', "is not a card that `verifier gate` writes: "),
        (json_text(made()), "is not a card that `verifier gate` writes: "),
        ("[]", "is not a card that `verifier gate` writes: Expected `object`"),
    ],
    ids=["absent", "no-json", "truncated", "another-format", "a-gate", "a-list"],
)
def test_what_is_no_card_is_code_4_and_one_sentence(tmp_path: Path, capsys, content, reason):
    file = tmp_path / "card.json"
    if content is not None:
        file.write_text(content)
    assert run(["gate", "--model", MODEL, "--check-card", str(file)]) == 4
    said = capsys.readouterr().err
    assert (f"`{file}` {reason}" in said, said.count("\n")) == (True, 1), said


def test_a_card_of_another_model_is_code_4(check):
    code, said = check(gate(), model="tiny:qwen3")
    assert code == 4
    assert said.endswith(f"is the card of another model: config.json of {MODEL} is not that of tiny:qwen3\n")


@pytest.mark.parametrize("words", [("--dry-run",), ("--json", "-"), ("--model", "tiny:llama")])
def test_a_card_is_checked_alone(check, words):
    assert check(gate(), *words)[0] == 4
