"""What a manifest says of moved contracts, and when nobody looks."""

import pytest

from verifier.contracts import examine
from verifier.contracts.examine import Looked, declared, text_of
from verifier.contracts.table import Contract
from verifier.launch.failures import Place

WHY = Place(file="vllm/a.py", line=3, message="ImportError: gone")
MOVED = Looked(contract=Contract(name="a", package="vllm", checks=("ENG001",)), failure=WHY)
MENDED = Looked(contract=Contract(name="b", package="vllm", bug="vllm #1"), failure=WHY)
DIED = Looked(contract=Contract(name="c", package="vllm", checks=("ENG002",)), failure=WHY, answered=False)


def test_the_verified_set_is_not_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.setattr(examine, "look", None)
    monkeypatch.setattr(examine, "running_set", lambda tier: ("vllm-0.22", {}))
    assert declared("cpu", tmp_path) == {"verified_set": "vllm-0.22"}


@pytest.mark.parametrize(("verified_set", "moved"), [("", True), ("vllm-0.21", True), ("vllm-0.22", False)])
def test_what_a_verified_set_states_has_not_moved(verified_set, moved):
    contract = Contract(name="a", package="vllm", fix="vllm-44371", gone_in=("vllm-0.22",))
    seen = Looked(contract=contract, failure=WHY, verified_set=verified_set)
    assert (seen.moved, seen.stated) == (moved, not moved)
    last = text_of([seen]).splitlines()[-1]
    assert last == (
        "    rests on it: the fix vllm-44371"
        if moved
        else "  does not hold in the verified set vllm-0.22, as docs/upstream.md states: a (the fix vllm-44371)"
    )
    holds = Looked(contract=contract, failure=None, verified_set=verified_set)
    assert not holds.moved
    assert not holds.stated


def test_what_moved_is_looked_at_once_and_kept(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(examine, "running_set", lambda tier: ("", {"vllm": "0.21.0"}))
    monkeypatch.setattr(examine, "look", lambda tier: looks.append(tier) or [MOVED, MENDED])
    first, second = (declared("cpu", tmp_path / "kept") for _ in range(2))
    assert first == second
    assert looks == ["cpu"]
    assert first["verified"] == {"vllm": "0.21.0"}
    (moved,) = first["moved_contracts"]
    assert (moved.name, moved.checks, moved.why) == ("a", ("ENG001",), "vllm/a.py:3: ImportError: gone")


def test_a_process_that_died_is_asked_again(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(examine, "running_set", lambda tier: ("", {"vllm": "0.21.0"}))
    monkeypatch.setattr(examine, "look", lambda tier: looks.append(tier) or [DIED])
    assert [declared("cpu", tmp_path)["moved_contracts"][0].checks for _ in range(2)] == [("ENG002",)] * 2
    assert len(looks) == 2
