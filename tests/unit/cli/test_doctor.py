"""Each thing that can be missing is named with its mend."""

import pytest

from verifier.cli import doctor
from verifier.platform.pins import PINS


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


def test_other_version_and_absent_package(machine):
    found = machine({**{name: PINS[name] for name in doctor.TIERS["cpu"]}, "torch": "2.10.0", "ray": None})
    assert found.tier is None
    assert [gap.missing for gap in found.gaps["cpu"]] == [
        f"torch {PINS['torch']} (2.10.0 is installed)",
        f"ray {PINS['ray']} (not installed)",
    ]
    text = doctor.render_text(found)
    assert text.isascii()
    assert "mend: `rm -f .venv/locked && ci/with-env verifier doctor` makes" in text


def test_nothing_installed(machine):
    found = machine({})
    assert found.tier is None
    assert len(found.gaps["cpu"]) == len(doctor.TIERS["cpu"])
