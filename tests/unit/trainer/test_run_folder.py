"""Runs that are continued by another version, whose knobs are not those of the run's folder."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.manifest import Manifest
from verifier.errors import UsageError
from verifier.trainer import run_folder
from verifier.trainer.checkpoint_folder import Checkpoints
from verifier.trainer.loop import StepLoop
from verifier.trainer.observer import SILENT
from verifier.trainer.run_folder import CONFIG, KNOBS, RunFolder, opened


def config_of(run: Path, *knobs: str) -> TrainConfig:
    return load(TrainConfig, overrides=["model=tiny:add", f"run={run}", *knobs])[0]


def begin(run: Path, *, without: str = "", **others: object) -> None:
    """A folder of a run of another version."""
    with opened(config_of(run)) as folder:
        folder.write_config(config_of(run))
    values = json.loads((run / KNOBS).read_text())
    if without:
        del values[without]
    RunFolder(run).write(KNOBS, json.dumps(values | others))


def refusal(run: Path, *knobs: str) -> str:
    with pytest.raises(UsageError) as raised, opened(config_of(run, *knobs)):
        pass
    return str(raised.value).removeprefix(f"the run folder `{run}` ")


@pytest.mark.parametrize("knob", ["engine.replicas", "fixes", "lora.rank", "optimizer.beta_1"])
def test_a_knob_that_the_older_run_lacks_has_its_default(knob, tmp_path):
    begin(tmp_path / "run", without=knob)
    with opened(config_of(tmp_path / "run")):
        pass


@pytest.mark.parametrize(
    ("knob", "value", "default"), [("seed", 7, 1), ("fixes", "[bridge-5840]", "[]"), ("lora.rank", 8, "null")]
)
def test_another_value_than_the_default_is_refused(knob, value, default, tmp_path):
    begin(tmp_path / "run", without=knob)
    shown = "['bridge-5840']" if knob == "fixes" else value
    assert refusal(tmp_path / "run", f"{knob}={value}") == (
        f"holds a run of a version without the knob {knob}, whose default is {default}, and {knob}={shown} is asked "
        "for: give the same value to continue it, or choose another --run"
    )


def test_a_knob_without_a_default_is_refused(tmp_path):
    begin(tmp_path / "run", without="dtype")
    assert refusal(tmp_path / "run") == (
        "holds a run of a version without the knob dtype, which has no default, and dtype=float32 is asked for: "
        "choose another --run"
    )


def test_a_knob_that_is_no_more_is_refused(tmp_path):
    begin(tmp_path / "run", **{"engine.colour": "red"})
    assert refusal(tmp_path / "run") == (
        "holds a run with engine.colour=red, a knob that this version does not have: choose another --run"
    )


def test_another_value_is_refused(tmp_path):
    begin(tmp_path / "run", **{"lora.rank": None})
    assert refusal(tmp_path / "run", "lora.rank=8") == (
        "holds a run with lora.rank=null, and lora.rank=8 is asked for: give the same value to continue it, or choose "
        "another --run"
    )


DAMAGES = {
    "cut": b'{"asked": 3, "st',
    "empty": b"",
    "a list": b"[1]",
    "no text": b"\xff\xfe",
    "others": b'{"asked": "x"}\n',
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["knobs.json", "finished.json", "metrics.jsonl"])
def test_a_damaged_file_is_refused_in_one_sentence(name, damage, tmp_path):
    run = tmp_path / "run"
    begin(run)
    content = DAMAGES[damage] if name != "metrics.jsonl" else DAMAGES[damage] + b'\n{"step": 1}\n{"step": 2}\n'
    (run / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"`.*{name}`|a knob that this version does not have"):
        _reads(run)


def _reads(run: Path) -> None:
    with opened(config_of(run)) as folder:
        assert folder.finished(3) is None
        folder.rewind(1)


@pytest.mark.parametrize(
    "name", ["logs/rank000.log", "logs/rank000.stack", "metrics.jsonl", "batches/000001-00.safetensors"]
)
def test_a_folder_where_a_run_keeps_a_file_is_refused(name, tmp_path):
    begin(tmp_path / "run")
    (tmp_path / "run" / name).mkdir(parents=True)
    with (
        pytest.raises(UsageError, match=f"`.*{name}` is a folder where a run keeps a file"),
        opened(config_of(tmp_path / "run")),
    ):
        pytest.fail("opened")


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(b"other"), Path.unlink, lambda file: shutil.rmtree(file.parent)]
)
def test_a_finished_run_whose_model_is_not_what_it_wrote_is_refused(damage, tmp_path):
    begin(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.exported.mkdir()
    file = folder.exported / "model.safetensors"
    file.write_bytes(b"weights")
    folder.finish(3, steps=3, loss=1.0, accuracy=None)
    (folder.exported / "README.md").write_text("a file of the user\n")
    assert folder.finished(3) == {"steps": 3, "loss": 1.0, "accuracy": None}
    damage(file)
    with pytest.raises(UsageError, match="is not what the finished run wrote"):
        folder.finished(3)
    assert folder.finished(4) is None


def test_a_last_line_that_was_cut_is_left_out(tmp_path):
    begin(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert RunFolder(tmp_path / "run").rewind(2) == {"step": 1, "loss": 2.0}
    assert file.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_a_batch_is_read_wherever_it_lies(tmp_path):
    """As it was written, packed with its trace, and once the records are removed; a step beyond the checkpoint goes."""
    folder = RunFolder(tmp_path / "run")
    begin(folder.path)
    name = folder.batch(1).name
    folder.batch(1).write_bytes(b"a batch")
    trace = store.create(folder.trace(1), Manifest())
    store.Recorder(trace, "controller", 0).close()
    store.complete(trace, Manifest())
    assert (folder.read_batch(1, name), folder.traces()) == (b"a batch", [trace])
    store.pack(trace, [folder.batch(1)])
    assert (folder.read_batch(1, name), folder.traces()) == (b"a batch", [trace])
    store.pack(trace, records=False)
    assert (folder.read_batch(1, name), folder.traces()) == (b"a batch", [])
    folder.rewind(0)
    with pytest.raises(UsageError, match=r"000001-00.safetensors` of step 1 is gone"):
        folder.read_batch(1, name)


@pytest.mark.timeout(20)
def test_what_the_run_did_not_write_is_neither_removed_nor_waited_for(tmp_path):
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    begin(run)
    (run / "batches" / "notes.txt").write_text("mine")
    RunFolder(run).rewind(0)
    assert (run / "batches" / "notes.txt").read_text() == "mine"
    (run / "metrics.jsonl").unlink(missing_ok=True)
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(UsageError, match="no regular file"):
        RunFolder(run).rewind(0)
    (run / "metrics.jsonl").unlink()
    foreign.mkdir()
    (run / "steps").rmdir()
    (run / "steps").symlink_to(foreign)
    assert refusal(run).endswith("is a link, and a run would write or remove what is there: remove the link")


@pytest.mark.parametrize("name", ["logs", "logs/rank000.log", "ranks", "tensorboard", "resumes.log", "steps/000001"])
def test_a_link_at_which_a_run_would_write_elsewhere_is_refused(name, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begin(run)
    elsewhere.mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(elsewhere if "." not in name else elsewhere / "absent")
    assert "is a link, and a run would write or remove what is there" in refusal(run)


@pytest.mark.parametrize("name", ["checkpoints", "wandb/latest-run", "notes"])
def test_a_link_to_a_folder_in_which_a_run_writes_checkpoints_or_nothing_is_taken(name, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begin(run)
    elsewhere.mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(elsewhere)
    with opened(config_of(run)):
        pass


def test_a_later_checkpoint_that_is_a_link_goes_and_what_it_names_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    checkpoints.path(4).symlink_to(elsewhere)
    assert [*checkpoints.last_whole()[1]] == [4]
    checkpoints.remove_after(0)
    assert (elsewhere.exists(), checkpoints.path(4).is_symlink()) == (True, False)


def test_the_config_that_a_run_keeps_is_the_one_that_it_trains_by(tmp_path):
    words = ("optimizer.weight_decay=0.25", "optimizer.beta_2=0.99", "grpo.clip_low=0.1", "data.batch_size=16")
    config = config_of(tmp_path / "run", *words)
    assert (config.optimizer.weight_decay, config.optimizer.beta_2, config.data.batch_size) == (0.25, 0.99, 16)
    with opened(config) as folder:
        folder.write_config(config)
    kept, _ = load(TrainConfig, file=tmp_path / "run" / CONFIG, overrides=[f"run={tmp_path / 'run'}"])
    assert kept == config


def test_a_second_stage_trains_what_the_first_has_left(tmp_path):
    begin = config_of(tmp_path / "run" / "first")
    config = replace(config_of(tmp_path / "run", "seed=7"), first=tmp_path / "first.yaml")
    going = run_folder.going_on(config, begin)
    assert (going.model, going.first, going.seed) == (str(tmp_path / "run" / "first" / "hf_model"), None, 7)


@pytest.mark.parametrize("name", ["lock", "batches/held-out.safetensors", "ranks/0000.jsonl", "logs/rank000.log"])
def test_a_pipe_in_a_run_folder_is_refused(name, tmp_path):
    begin(tmp_path / "run")
    file = tmp_path / "run" / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    said = "cannot be written: No such device or address" if name == "lock" else "is a pipe, a socket or a device"
    assert said in refusal(tmp_path / "run")


def test_held_out_problems_are_those_of_the_command_and_not_of_the_run_before_it(tmp_path):
    """They may be others, `evaluation.num_problems` is free, and the file may be damaged."""
    begin(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.held_out.write_bytes(b"")
    folder.rewind(0)
    asked: list[int] = []
    loop: Any = SimpleNamespace(
        rollouts=None, folder=folder, progress=lambda text: None, observer=SILENT,
        held_out=SimpleNamespace(save=lambda file: file.write_bytes(b"problems")),
        call=lambda name, batch: asked.append(len(Path(batch).read_bytes())) or [[1.0]],
    )  # fmt: skip
    for step in (2, 4):
        assert StepLoop._evaluate(loop, step)["accuracy"] == 1.0
    assert asked == [8, 8]
