"""Lines of metrics, what follows from them, and where they go."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.trainer.fitting import load_algorithms
from verifier.trainer.metrics import by_position, metrics_of, mismatch_facts
from verifier.trainer.run_folder import RunFolder

WANDB = """
import json, pathlib
def init(**given):
    place = pathlib.Path(given["dir"], "wandb")
    place.mkdir()
    (place / "init").write_text(json.dumps([given["mode"], given["name"], given["config"]["steps"]]))
    class Run:
        def log(self, values, step):
            (place / str(step)).write_text(json.dumps(values))
        def finish(self):
            (place / "finished").touch()
    return Run()
"""
MODEL = SimpleNamespace(tier="cpu", checkpoint=SimpleNamespace(config={}))


def config_of(folder, *, wandb=False):
    return TrainConfig(model="m", run=folder, steps=7, wandb=wandb)


def written(folder, rows, view=None, **options):
    """Lines of a run's metrics.jsonl, once these rows were added."""
    with metrics_of(RunFolder(folder), config_of(folder, **options), MODEL, view) as metrics:
        for row in rows:
            metrics.add(row, [3])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_rates_trend_and_signs_and_a_resumed_run_goes_on_with_them(tmp_path):
    step = {
        "reward": 0.5, "mismatch_p99": 2.0, "tokens": 60, "train_s": 2.0, "sent_gb": 3.0, "transfer_s": 1.5,
    }  # fmt: skip
    first = written(tmp_path, [{"step": at, **step} for at in range(1, 20)])
    assert first[-1] == {
        "step": 19, **step, "train_tokens_per_s": 30.0, "transfer_gb_per_s": 2.0, "mismatch_floor": 2.0,
        "mismatch_trend": 1.0,
    }  # fmt: skip
    last = written(tmp_path, [{"step": 20, **step, "mismatch_p99": 3.0}])[-1]
    assert last["mismatch_floor"] == 2.0
    assert last["signs"] == ["reward is flat over 20 steps: 0.5, then 0.5"]
    assert "mfu" not in last


def test_whoever_looks_sees_each_line(tmp_path):
    seen = []
    view = SimpleNamespace(add=seen.append, judged=None)
    assert written(tmp_path, [{"step": 1, "loss": 0.5}], view) == seen


def test_wandb_gets_the_numbers_offline(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    load_algorithms(config_of(run, wandb=True))
    written(run, [{"step": 3, "loss": 0.5, "mismatch_by_position": [1.0, None]}], wandb=True)
    monkeypatch.delitem(sys.modules, "wandb")
    assert json.loads((run / "wandb" / "init").read_text()) == ["offline", "run", 7]
    assert json.loads((run / "wandb" / "3").read_text()) == {"step/loss": 0.5, "mismatch/mismatch_by_position_1": 1.0}
    assert (run / "wandb" / "finished").exists()


def test_wandb_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = "wandb is true and the package wandb is not installed: install it, or leave it out"
    with pytest.raises(UsageError) as refused:
        load_algorithms(config_of(tmp_path, wandb=True))
    assert str(refused.value) == sentence
    load_algorithms(config_of(tmp_path))


def test_mismatch_is_told_by_eighths_of_the_longest_answer():
    differences, positions = np.array([1.0, -3.0, 4.0, -5.0]), np.array([0, 1, 2, 99])
    assert by_position(differences, positions, 16) == [2.0, 4.0, None, None, None, None, None, 5.0]
    assert mismatch_facts(differences)["mismatch_max"] == 5.0
    assert mismatch_facts(differences[:0]) == {}


def test_tensorboard_shows_steps_that_are_taken_again_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one process and second are read in the order of their numbers as texts: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    written(tmp_path, [{"step": step, "loss": float(step)} for step in (1, 2, 3)])
    written(tmp_path, [{"step": step, "loss": 10.0 * step} for step in (2, 3)])
    curve = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(item.step, item.value) for item in curve.Scalars("step/loss")] == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_tensorboard_has_each_number_of_a_line_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    line = {"step": 7, "reward": 0.5, "accuracy": 0.25, "train_s": 2.0, "mismatch_by_position": [0.5, None]}
    written(tmp_path, [line])
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {tag: [(item.step, item.value) for item in curves.Scalars(tag)] for tag in curves.Tags()["scalars"]}
    assert shown == {
        "rollout/reward": [(7, 0.5)], "held-out/accuracy": [(7, 0.25)], "time/train_s": [(7, 2.0)],
        "mismatch/mismatch_by_position_1": [(7, 0.5)],
    }  # fmt: skip


def test_a_resume_keeps_the_lines_up_to_its_checkpoint_and_adds_one_a_step(tmp_path):
    for name in ("batches", "steps"):
        (tmp_path / name).mkdir()
    written(tmp_path, [{"step": step, "loss": float(step)} for step in (1, 2, 3)])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # cut by the stop
    assert RunFolder(tmp_path).rewind(2) == {"step": 2, "loss": 2.0}
    lines = written(tmp_path, [{"step": step, "loss": 10.0 * step} for step in (3, 4)])
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


SAMPLES = [
    {"id": "1/0/0", "prompt": "3 + 4 =", "completion": "7", "answer": "7", "reward": 1.0},
    {"id": "1/1/0", "prompt": "a|b", "completion": "two\nlines", "answer": None, "reward": 0.25},
]


def test_sampled_texts_are_lines_of_json_and_a_table_in_tensorboard(tmp_path):
    with metrics_of(RunFolder(tmp_path), config_of(tmp_path), MODEL) as metrics:
        metrics.add_samples(1, SAMPLES)
        metrics.add_samples(2, ())
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, **item} for item in SAMPLES]
    (file,) = (tmp_path / "tensorboard").iterdir()
    texts = [
        value.tensor.string_val[0].decode()
        for event in EventFileLoader(str(file)).Load() for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    ]  # fmt: skip
    assert texts == [
        "| prompt | completion | answer | reward |\n| --- | --- | --- | --- |\n| 3 + 4 = | 7 | 7 | 1 |\n"
        "| a\\|b | two lines |  | 0.25 |"
    ]


def test_a_resumed_run_has_the_texts_of_the_steps_that_it_kept(tmp_path):
    folder = RunFolder(tmp_path)
    for name in ("batches", "steps"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        folder.add_samples([{"step": step, **SAMPLES[0]}])
        folder.add_metrics({"step": step, "loss": 1.0})
    assert folder.rewind(2) == {"step": 2, "loss": 1.0}
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [1, 2]
