"""What `verifier train --replay` refuses, each by one sentence before anything starts.

What this does not exercise: the comparison itself (tests/dist/test_train_replay_step.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verifier.cli.train import require_replay
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.trainer import update_log
from verifier.trainer.replay import replay_step
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.update_log import RankUpdate

KNOBS = ("model=tiny:add", "steps=5", "mesh.dp=2", "evaluation.num_problems=0")


def config_of(*knobs: str) -> TrainConfig:
    given = {text.partition("=")[0] for text in knobs}
    kept = [text for text in KNOBS if text.partition("=")[0] not in given]
    config, _ = load(TrainConfig, overrides=[*kept, "run=other", *knobs])
    return config


def update(step: int, **fields: object) -> RankUpdate:
    values = {
        "step": step, "number": step, "batch": f"{step:06d}-00.safetensors", "first": True, "mesh": "dp2", "steps": 5,
        "loss": 1.0, "grad_norm": 1.0, "peak_memory": 1, "gradients": {"weight (chunk 0)": "vd1:0"}, **fields,
    }  # fmt: skip
    return RankUpdate(**values)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Folder of a run of 5 steps without a checkpoint, whose fourth has no token in the loss."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("run"))
    (folder.path / "batches").mkdir(parents=True)
    folder.write_config(config_of())
    for step in (1, 2, 3, 4, 5):
        folder.add_metrics({"step": step})
        for rank in (0, 1):
            if step != 4:
                update_log.append(folder.path, rank, update(step))
        folder.batch(step).touch()
    return folder.path


def refusal(run: Path, step: int, *knobs: str) -> str:
    with pytest.raises(UsageError) as found:
        replay_step(config_of(*knobs), run, step, print)
    return str(found.value)


def refusals(run: Path) -> dict[str, str]:
    """The run is spoiled from one to the next."""
    with pytest.raises(UsageError) as without:
        require_replay({}, run, None, {"--dry-run": False})
    found = {
        "no step": str(without.value),
        "no run": refusal(run / "batches", 3),
        "other knob": refusal(run, 3, "seed=2"),
        "step 0": refusal(run, 0),
        "step beyond": refusal(run, 6),
        "step without update": refusal(run, 4),
        "other mesh": refusal(run, 3, "mesh.dp=1"),
    }
    (run / "batches" / "000002-00.safetensors").unlink()
    found["batch gone"] = refusal(run, 3)
    update_log.file_of(run, 1).write_bytes(update_log.file_of(run, 1).read_bytes()[:-20])
    found["line cut"] = refusal(run, 5)
    update_log.rewind(run, 3)
    for rank in (0, 1):
        update_log.append(run, rank, update(5, steps=8))
    found["other schedule"] = refusal_of_schedule(run)
    for file in (run / update_log.FOLDER).iterdir():
        file.unlink()
    (run / update_log.FOLDER).rmdir()
    found["not recorded"] = refusal(run, 3, "optimizer.schedule=linear")
    return found


def refusal_of_schedule(run: Path) -> str:
    """Refusal of a run whose schedule of rates ended elsewhere when it was continued."""
    RunFolder(run).write_config(config_of("optimizer.schedule=linear"))
    return refusal(run, 5, "optimizer.schedule=linear")


def test_each_refusal_is_one_sentence(run, same_as_file):
    said = refusals(run)
    assert all("\n" not in text for text in said.values())
    same_as_file("replay-refusals.txt", "".join(f"{name}\n  {text}\n" for name, text in said.items()))


def test_a_folder_is_read_again_as_it_was_written(run):
    assert update_log.read(run, 1)[0] == update(1)
    update_log.rewind(run, 2)
    assert [[item.step for item in update_log.read(run, rank)] for rank in (0, 1, 2)] == [[1, 2], [1, 2], []]


def test_the_config_of_the_folder_is_the_config_of_the_run(run):
    config, _ = load(TrainConfig, file=run / "config.yaml")
    assert (config.mesh.dp, config.dtype, config.steps) == (2, "float32", 5)
    assert json.loads((run / "knobs.json").read_text())["dtype"] == "float32"
