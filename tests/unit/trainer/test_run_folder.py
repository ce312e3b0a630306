"""Runs that are continued by another version, whose knobs are not those of the run's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.trainer import first_run
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
    going = first_run.going_on(config, begin)
    assert (going.model, going.first, going.seed) == (str(tmp_path / "run" / "first" / "hf_model"), None, 7)
