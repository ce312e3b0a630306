"""Files of a rank beside a checkpoint, which a judged run needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifier.errors import UsageError
from verifier.trainer.saves_megatron import Saves
from verifier.trainer.state_elements_megatron import Elements

ELEMENTS: Elements = {"master": {"a": ([1], [2])}}
HELD = [{"name": "weight/a", "coordinate": "tp=1", "dtype": "float32", "shape": [2], "digest": "vd1:0"}]


def test_a_checkpoint_without_what_ranks_held_is_refused(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"older version, without `saved/0001.json`: leave --verify out"):
        Saves(1, "tp=1").read(folder, HELD, ELEMENTS, same_mesh=True)


def test_another_mesh_reads_what_all_ranks_saved(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    for rank, element in enumerate((4, 5)):
        saves = Saves(rank, "")
        saves.write(folder, HELD, {"master": {"a": ([element], [7])}})
    again, found = Saves(2, "tp=2"), []
    again.read(folder, HELD, ELEMENTS, same_mesh=False)
    again.record(SimpleNamespace(emit=lambda *given: found.append(given[0])))
    (elements,) = found
    assert (elements.name, elements.saved_elements, again.trained) == ("master", 2, 3)
    again.record(SimpleNamespace(emit=found.append))
    assert len(found) == 1


def test_another_mesh_refuses_a_checkpoint_without_elements(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    Saves(0, "").write(folder, HELD, ELEMENTS)
    (folder / "saved" / "0000.elements.json").unlink()
    Saves(0, "").read(folder, HELD, ELEMENTS, same_mesh=True)
    with pytest.raises(UsageError, match=r"older version, without `saved/0000.elements.json`: leave --verify out"):
        Saves(0, "").read(folder, HELD, ELEMENTS, same_mesh=False)
