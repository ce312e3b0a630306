"""Files of a rank beside a checkpoint: a judged run needs what tells how far the rank had trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifier.errors import UsageError
from verifier.trainer.saves_megatron import Saves
from verifier.trainer.state_elements_megatron import Elements

ELEMENTS: Elements = {"master": {"a": ([1], [2])}}
HELD = [{"name": "weight/a", "coordinate": "tp=1", "dtype": "float32", "shape": [2], "digest": "vd1:0"}]


def test_how_far_a_rank_had_trained_is_read_again(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    saves = Saves(1, "tp=1")
    saves.trained = 3
    saves.write(folder, HELD, ELEMENTS, optimizer_steps=5)
    again = Saves(1, "tp=1")
    again.read(folder, HELD, ELEMENTS, same_mesh=True)
    assert again.trained == 3


def test_a_checkpoint_without_it_is_refused(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    Saves(1, "tp=1").write(folder, HELD, ELEMENTS, optimizer_steps=5)
    (folder / "saved" / "0001.reached.json").unlink()
    with pytest.raises(UsageError, match=r"older version, without `saved/0001.reached.json`: leave --verify out"):
        Saves(1, "tp=1").read(folder, HELD, ELEMENTS, same_mesh=True)


def test_another_mesh_reads_what_all_ranks_saved(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    for rank, element in enumerate((4, 5)):
        saves = Saves(rank, "")
        saves.trained = 3
        saves.write(folder, HELD, {"master": {"a": ([element], [7])}}, optimizer_steps=5)
    again, found = Saves(2, "tp=2"), []
    again.read(folder, HELD, ELEMENTS, same_mesh=False)
    again.record(SimpleNamespace(emit=lambda *given: found.append(given[0])))
    elements, trained = found
    assert (elements.name, elements.saved_elements, trained.step, again.trained) == ("master", 2, 3, 3)
    again.record(SimpleNamespace(emit=found.append))
    assert len(found) == 2


def test_another_mesh_refuses_a_checkpoint_without_elements(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    Saves(0, "").write(folder, HELD, ELEMENTS, optimizer_steps=5)
    (folder / "saved" / "0000.elements.json").unlink()
    Saves(0, "").read(folder, HELD, ELEMENTS, same_mesh=True)
    with pytest.raises(UsageError, match=r"older version, without `saved/0000.elements.json`: leave --verify out"):
        Saves(0, "").read(folder, HELD, ELEMENTS, same_mesh=False)
