"""Words and files of `verifier train` by a second reader: what it reads, what it leaves out, and that CFG002 agrees.

What this does not exercise: a run whose config loses a word (tests/dist/test_train_command.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from verifier.config.load import load, resolved
from verifier.config.training import TrainConfig
from verifier.config.words import MAX_RUNS, asked, kept, note, noted
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_trainer import KnobsGiven
from verifier.core.trace import Trace
from verifier.knob import entries
from verifier.trainer.first_run import first_of, going_on

FILE = """
model: tiny:add
steps: 7
optimizer:
  learning_rate: 1e-4
  schedule: linear
optimizer.beta_2: 0.99
dtype: bf16
checkpoint: {asynchronous: yes, every: null}
lora.targets: [linear_qkv, linear_fc2]
run: ./runs//again/
seed: ${steps}
"""


def words(*texts: str) -> dict[str, str]:
    return asked(TrainConfig, ["/usr/bin/verifier", "train", *texts])


def judged(given: dict[str, str], config: TrainConfig, name: str = "command") -> Outcome:
    trace = Trace(Manifest(config=config.to_dict()), [KnobsGiven(name=name, version=1, values=given)])
    return run_check(REGISTRY["CFG002"], trace)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_words_go_before_the_file(file: Path) -> None:
    found = words(str(file), "steps=9", "optimizer.schedule=constant", "fixes=[a, b]", "--tp", "2", "--verify")
    assert found == {
        "model": "tiny:add", "steps": "9", "optimizer.learning_rate": "1e-4", "optimizer.schedule": "constant",
        "optimizer.beta_2": "0.99", "dtype": "bfloat16", "checkpoint.asynchronous": "true", "checkpoint.every": "null",
        "lora.targets": '["linear_qkv", "linear_fc2"]', "run": "./runs//again/", "fixes": '["a", "b"]',
        "mesh.tp": "2",
    }  # fmt: skip


def test_the_config_of_these_words_has_them_and_a_lost_one_shows(file: Path) -> None:
    file.write_text(FILE.replace(", every: null", ""))
    given = words("--config", str(file), "mesh.tp=2", "grpo.mode=sync", "optimizer.epsilon=1.0e-08", "lora.rank=8")
    texts = ["mesh.tp=2", "grpo.mode=sync", "optimizer.epsilon=1.0e-08", "lora.rank=8"]
    config, _ = load(TrainConfig, file=file, overrides=texts)
    found = judged(given, config)
    assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, len(given), None)
    lost, _ = load(TrainConfig, file=file, overrides=[texts[0], *texts[2:], "optimizer.beta_2=0.98"])
    assert judged(given, lost).finding is not None
    assert [item.what for item in judged(given, lost).finding.bad] == ["optimizer.beta_2"]  # type: ignore[union-attr]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_this_project_are_read_alike(path: Path) -> None:
    config, _ = load(TrainConfig, file=path, overrides=["run=runs/other"])
    given = words(str(path), "run=runs/other")
    begun = config if config.first is None else going_on(config, first_of(config))
    assert judged(given, begun).verdict is Verdict.HOLDS


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_a_run_keeps_of_these_configs_is_its_config(path: Path, tmp_path: Path) -> None:
    config, _ = load(TrainConfig, file=path, overrides=["run=runs/other", "optimizer.beta_2=0.98"])
    (tmp_path / "config.yaml").write_text(resolved(config, {}))
    found = kept(TrainConfig, tmp_path / "config.yaml")
    assert judged(found, config, "config.yaml").verdict is Verdict.HOLDS
    assert len(found) > 50
    begun, _ = load(TrainConfig, file=path, overrides=["run=runs/other"])
    outcome = judged(found, begun, "config.yaml")
    assert [item.what for item in outcome.finding.bad] == ["optimizer.beta_2 in config.yaml"]  # type: ignore[union-attr]
    assert kept(TrainConfig, tmp_path / "absent.yaml") == {}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_this_project_may_end_within_their_warm_up(path: Path) -> None:
    config, _ = load(TrainConfig, file=path, overrides=["steps=1", "run=runs/other"])
    assert config.optimizer.warmup_steps > config.num_updates


def test_every_default_is_read_alike() -> None:
    begun, _ = load(TrainConfig, overrides=["model=tiny:add"])
    texts = {"model": "tiny:add"}
    for entry in entries(TrainConfig):
        value = entry.spelled(entry.default)
        if not entry.computed and not entry.required and value is not None and entry.key != "trace":
            texts[entry.key] = f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)
    config, _ = load(TrainConfig, overrides=[f"{key}={text}" for key, text in texts.items()])
    assert config == begun
    given = words(*(f"{key}={text}" for key, text in texts.items()))
    assert given.keys() == texts.keys()
    assert judged(given, config).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    "texts",
    [
        ["--replay", "runs/a", "--step", "2"], ["model=tiny:add", "--preflight"], ["first=~", "steps=2"],
        ["--no-such-option", "steps=2"], ["no.such.key=2"], ["absent.yaml", "steps=2"],
    ],
)  # fmt: skip
def test_other_runs_have_no_words(texts: list[str]) -> None:
    assert words(*texts) == {}


def test_other_programs_have_none() -> None:
    assert asked(TrainConfig, ["/usr/bin/pytest", "train", "steps=2"]) == {}
    assert asked(TrainConfig, ["/usr/bin/verifier", "sweep", "steps=2"]) == {}
    assert asked(TrainConfig, ["verifier"]) == {}


def test_what_is_no_yaml_or_no_file_is_left_to_the_reader_of_configs(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("steps: [")
    assert words(str(bad), "model=tiny:add") == {}
    assert words("/dev/null", "model=tiny:add") == {}


def test_words_are_noted_before_a_file_changes(file: Path) -> None:
    note(TrainConfig, ["verifier", "train", str(file)])
    file.write_text("steps: 8")
    assert noted()["steps"] == "7"
    note(TrainConfig, ["pytest"])
    assert noted() == {}


def test_a_run_that_begins_with_another_has_words_for_both(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model: tiny:add\nsteps: 3\nrun: elsewhere\ndtype: fp32\nverify: {steps: false, every: 0}\n")
    second.write_text(f"model: tiny:add\nfirst: {first}\nsteps: 2\nverify: {{steps: true}}\n")
    texts = [f"run={tmp_path / 'run'}", "seed=4"]
    note(TrainConfig, ["verifier", "train", str(second), *texts])
    config, _ = load(TrainConfig, file=second, overrides=texts)
    begin = first_of(config)
    assert noted(1) == {
        "model": "tiny:add", "steps": "3", "verify.steps": "true", "verify.every": "0",
        "run": f"{tmp_path / 'run'}/first",
    }  # fmt: skip
    assert judged(dict(noted(1)), begin).verdict is Verdict.HOLDS
    assert judged(dict(noted()), going_on(config, begin)).verdict is Verdict.HOLDS
    assert noted(2) == {}
    bad = judged(dict(noted()), config).finding
    assert bad is not None
    assert {item.what for item in bad.bad} == {"model", "first"}
    note(TrainConfig, ["pytest"])


def test_a_file_that_begins_with_itself_is_read_some_times_only(tmp_path: Path) -> None:
    file = tmp_path / "again.yaml"
    file.write_text(f"model: tiny:add\nfirst: {file}\n")
    note(TrainConfig, ["verifier", "train", str(file)])
    assert noted(MAX_RUNS - 1)
    assert noted(MAX_RUNS) == {}
    note(TrainConfig, ["pytest"])
