"""The list of checkpoints of a run: the last ones stay, and a run goes on from the newest whole one."""

from __future__ import annotations

from pathlib import Path

from verifier.trainer.checkpoint_folder import Checkpoints, RunState


def saved(folder: Path, steps: list[int], keep: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.begin(step)
        checkpoints.finish(
            RunState(step=step, updates=step, data_position=step, weight_version=step, seed=1, config="", mesh="")
        )
    return checkpoints


def test_the_last_checkpoints_stay_and_a_run_goes_on_from_the_newest(tmp_path):
    """In the order of their steps: as text 1,000,000 comes before 900,000."""
    found, refused = saved(tmp_path / "a", [2, 10, 900_000, 1_000_000], keep=2).last_whole()
    assert {item.name for item in (tmp_path / "a").iterdir()} == {"900000", "1000000"}
    assert found is not None
    assert (found.step, refused) == (1_000_000, {})


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path):
    checkpoints = saved(tmp_path / "a", [1, 2, 3], keep=3)
    (checkpoints.path(3) / "state.json").write_bytes(b"{}")
    checkpoints.begin(4)
    found, refused = checkpoints.last_whole()
    assert found is not None
    assert (found.step, [*refused]) == (2, [3])
