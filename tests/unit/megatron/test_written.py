"""What is read back from a checkpoint: the bits of its files, whatever was given, and other tensors in each save."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifier.megatron import written_megatron
from verifier.megatron.written_megatron import TENSORS, Stepped, Written

PARTS = ("param", "exp_avg", "exp_avg_sq")


def given(key: str, data: Any, *offset: int) -> Any:
    return SimpleNamespace(key=key, data=data, global_offset=offset, local_shape=tuple(data.shape), replica_id=0)


@pytest.fixture(autouse=True)
def _without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        written_megatron,
        "_tensors_in",
        lambda state: [item for item in state.values() if 0 not in getattr(item, "local_shape", (0,))],
    )


def saved(folder: Path, state: dict[str, Any]) -> None:
    """Files of torch's own writer, which lays tensors out as megatron-core's does."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    save({key: item.data for key, item in state.items()}, storage_writer=FileSystemWriter(folder), no_dist=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_the_files_stand_beside_what_was_given(tmp_path: Path, dtype: Any) -> None:
    state = {key: given(key, torch.randn(3, 5, dtype=dtype), 0, 0) for key in ("a", "optimizer.state.exp_avg.a")}
    written = Written(state, "000001")
    saved(tmp_path, state)
    found = written.read(tmp_path)
    assert sorted(item["name"] for item in found) == ["a", "optimizer.state.exp_avg.a"]
    assert all(item["given"] == item["written"] and len(item["given"]) == 15 for item in found)


def test_what_is_given_is_copied_when_it_is_given(tmp_path: Path) -> None:
    state = {"a": given("a", torch.ones(4), 0)}
    written = Written(state, "000001")
    state["a"].data.add_(1)  # a step, before the writer has read the memory
    saved(tmp_path, state)
    (found,) = written.read(tmp_path)
    assert found["given"] != found["written"]


def test_a_tensor_that_is_not_in_the_files_has_no_bits(tmp_path: Path) -> None:
    state = {"a": given("a", torch.ones(4), 0)}
    saved(tmp_path, {"b": state["a"]})
    assert Written(state, "1").read(tmp_path)[0]["written"] == []


def test_each_kind_has_its_share_and_each_save_others() -> None:
    keys = [f"{kind}{number}" for kind in ("", "optimizer.state.exp_avg.") for number in range(20)]
    state = {key: given(key, torch.ones(2), 0) for key in keys}
    names = [{item.name for item in Written(state, turn)._given} for turn in ("1", "2")]
    assert [sum("exp_avg" in name for name in each) for each in names] == [TENSORS, TENSORS]
    assert [len(each) for each in names] == [2 * TENSORS, 2 * TENSORS]
    assert names[0] != names[1]


def left(local: str, begin: int, *states: Any) -> Stepped:
    return Stepped(chunk=0, local=local, begin=begin, states=states)


def test_the_files_stand_beside_what_the_last_update_left(tmp_path: Path) -> None:
    """Of a parameter whose elements 4 to 6 this rank steps, and that a rank has written whole."""
    whole = {
        f"{part}w": torch.arange(8.0) + at for at, part in enumerate(("", *(f"optimizer.state.{x}." for x in PARTS)))
    }
    state: dict[str, Any] = {key: given(key, data, 0) for key, data in whole.items()}
    saved(tmp_path, state)
    own = [whole[f"optimizer.state.{part}.w"][4:7].clone() for part in PARTS]
    stale = left("a.to_wrap.b", 4, *own, whole["w"][4:7] + 1)
    written = Written({"model0": {"a.b": state["w"]}}, "1", [stale])
    found = {item["name"]: item for item in written.read(tmp_path)}
    assert {name: item["given"] == item["written"] for name, item in found.items()} == {
        "optimizer.state.param.w after the last update": True,
        "optimizer.state.exp_avg.w after the last update": True,
        "optimizer.state.exp_avg_sq.w after the last update": True,
        "w after the last update": False,
    }
    assert len(found["w after the last update"]["written"]) == 3


def test_what_is_cut_before_it_is_written_is_left_out(tmp_path: Path) -> None:
    state = {"w": given("w", torch.ones(4), 0)}
    saved(tmp_path, state)
    model = {"gate": SimpleNamespace(key="gate"), "moved": given("moved", torch.ones(4), 0)}
    updates = [left(name, 0, torch.zeros(4)) for name in ("gate", "moved", "unknown")]
    assert Written({"model0": model}, "1", updates).read(tmp_path) == []
