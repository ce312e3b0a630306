"""Files of a rank beside a checkpoint, which a judged run needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from verifier.core.record import Record
from verifier.errors import UsageError
from verifier.stages.checkpoint.probe_loaded_state_megatron import record_loaded
from verifier.trainer.state_megatron import Elements, write_saved

ELEMENTS: Elements = {"master": {"a": ([1], [2])}}
HELD = [{"name": "weight/a", "coordinate": "tp=1", "dtype": "float32", "shape": [2], "digest": "vd1:0"}]


def saved(tmp_path, *ranks: Elements) -> Path:
    """A checkpoint of step 3 in which each rank held these elements."""
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    for rank, elements in enumerate(ranks):
        write_saved(folder, rank, HELD, elements)
    return folder


def loaded(folder, rank: int = 0, *, same_mesh: bool = True) -> list[Record]:
    found: list[Record] = []
    probe = SimpleNamespace(emit=lambda *given: found.append(given[0]))
    record_loaded(probe, folder, rank, f"tp={rank}", HELD, ELEMENTS, same_mesh=same_mesh)
    return found


def test_a_checkpoint_without_what_ranks_held_is_refused(tmp_path):
    folder = saved(tmp_path, ELEMENTS)
    (folder / "saved" / "0000.json").unlink()
    with pytest.raises(UsageError, match=r"older version, without `saved/0000.json`: leave --verify out"):
        loaded(folder)


def test_another_mesh_reads_what_all_ranks_saved(tmp_path):
    folder = saved(tmp_path, *({"master": {"a": ([element], [7])}} for element in (4, 5)))
    (elements,) = loaded(folder, 2, same_mesh=False)
    assert (elements.name, elements.saved_elements) == ("master", 2)


def test_another_mesh_refuses_a_checkpoint_without_elements(tmp_path):
    folder = saved(tmp_path, ELEMENTS)
    (folder / "saved" / "0000.elements.json").unlink()
    loaded(folder)
    with pytest.raises(UsageError, match=r"older version, without `saved/0000.elements.json`: leave --verify out"):
        loaded(folder, same_mesh=False)
