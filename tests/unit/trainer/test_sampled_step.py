"""Routes that the trainer's routers chose by themselves, from the files of several ranks."""

from __future__ import annotations

import numpy as np

from verifier.trainer.sampled_step import chosen_routes


def test_routes_of_ranks_are_put_together_by_rollout_position_and_layer(tmp_path):
    first = [[1, 0, 2, 5, 6], [0, 1, 2, 1, 3]]  # rollout, position, layer, experts
    second = [[0, 0, 2, 0, 7], [1, 0, 0, 2, 4], [0, 1, 2, 1, 3]]  # the last was seen by both
    for rank, rows in enumerate((first, second)):
        np.save(tmp_path / f"{rank:04d}.npy", np.array(rows, np.int32))
    found = chosen_routes(tmp_path, 3)
    assert [rows.tolist() for rows in found] == [
        [[0, 2, 0, 7], [1, 2, 1, 3]], [[0, 0, 2, 4], [0, 2, 5, 6]], []
    ]  # fmt: skip


def test_a_run_that_tells_no_routes_has_none(tmp_path):
    assert chosen_routes(tmp_path / "routes-1", 2) == []
