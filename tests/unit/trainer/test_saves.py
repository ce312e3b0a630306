"""Files of a rank beside a checkpoint: a judged run needs what tells how far the rank had trained."""

from __future__ import annotations

import pytest

from verifier.errors import UsageError
from verifier.trainer.saves_megatron import Saves

HELD = [{"name": "weight/a", "coordinate": "tp=1", "dtype": "float32", "shape": [2], "digest": "vd1:0"}]


def test_how_far_a_rank_had_trained_is_read_again(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    saves = Saves(1, "tp=1")
    saves.trained = 3
    saves.write(folder, HELD, optimizer_steps=5)
    again = Saves(1, "tp=1")
    again.read(folder, HELD)
    assert again.trained == 3


def test_a_checkpoint_without_it_is_refused(tmp_path):
    folder = tmp_path / "000003"
    (folder / "saved").mkdir(parents=True)
    Saves(1, "tp=1").write(folder, HELD, optimizer_steps=5)
    (folder / "saved" / "0001.reached.json").unlink()
    with pytest.raises(UsageError, match=r"older version, without `saved/0001.reached.json`: leave --verify out"):
        Saves(1, "tp=1").read(folder, HELD)
