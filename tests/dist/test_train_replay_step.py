"""One step of a recorded run, trained again: the same gradients bit by bit, and each way in which they are not.

What this does not exercise: a run that was trained on a cluster. On a GPU: tests/h100/test_train_gpu.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.meta.sources import ROOT
from verifier.cli.app import run as command
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.manifest import Manifest
from verifier.faults.training_trial import GRPO_KNOBS
from verifier.launch.fork_launcher import ForkLauncher
from verifier.trainer import update_log
from verifier.trainer.controller import Trainer
from verifier.trainer.replay import Replayed, replay_step
from verifier.trainer.run_folder import RunFolder

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "add-sft.yaml"
SFT = ("steps=4", "data.batch_size=16", "evaluation.num_problems=0", "checkpoint.every=2", "checkpoint.keep=9")
GRPO = (
    "model=tiny:add", "algorithm=grpo", *GRPO_KNOBS, "steps=3", "grpo.mini_batches=2", "grpo.epochs=2",
    "grpo.kl_weight=0.1", "evaluation.num_problems=0", "checkpoint.every=1", "checkpoint.keep=9", "mesh.tp=2",
)  # fmt: skip


def config_of(run: Path, knobs: Sequence[str], file: Path | None) -> TrainConfig:
    config, _ = load(TrainConfig, file=file, overrides=[*knobs, f"run={run}"])
    return config


@pytest.fixture(scope="module")
def sft(trainer_launcher: ForkLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two data-parallel ranks, profiled in its third step."""
    run = tmp_path_factory.mktemp("sft") / "run"
    Trainer(config_of(run, [*SFT, "profile.steps=[3]"], CONFIG), print, launcher=trainer_launcher).run()
    return run


@pytest.fixture
def spoiled(sft: Path, tmp_path: Path) -> Path:
    """A copy of the run, for a test that changes it."""
    return shutil.copytree(sft, tmp_path / "run")


def replayed(launcher: ForkLauncher, run: Path, step: int, knobs: Sequence[str] = SFT) -> Replayed:
    file = None if knobs is GRPO else CONFIG
    return replay_step(config_of(run.with_name("other"), knobs, file), run, step, print, launcher=launcher)


def contents(run: Path) -> dict[str, str]:
    files = sorted(file for file in run.rglob("*") if file.is_file())
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize(("step", "begun_at"), [(1, 0), (2, 0), (3, 2), (4, 2)])
def test_each_step_again_from_the_checkpoint_before_it(sft, trainer_launcher, step, begun_at):
    before = contents(sft)
    found = replayed(trainer_launcher, sft, step)
    assert (found.begun_at, found.difference) == (begun_at, None)
    names = [set(update_log.read(sft, rank)[0].gradients) for rank in (0, 1)]
    assert found.num_tensors == sum(map(len, names))
    assert all(names)
    assert contents(sft) == before


def test_all_updates_of_a_step_of_grpo_on_tensor_parallel_ranks(trainer_launcher, tmp_path):
    run = tmp_path / "run"
    Trainer(config_of(run, GRPO, None), print, launcher=trainer_launcher).run()
    updates = [item for item in update_log.read(run, 1) if item.step == 3]
    assert len(updates) == 4
    found = replayed(trainer_launcher, run, 3, GRPO)
    assert (found.begun_at, found.difference) == (2, None)
    assert found.num_tensors == 2 * sum(len(item.gradients) for item in updates)


def test_a_step_whose_batches_were_packed_is_replayed(spoiled, trainer_launcher):
    folder = RunFolder(spoiled)
    for step, records in ((3, True), (4, False)):
        trace = store.create(folder.trace(step), Manifest())
        store.Recorder(trace, "controller", 0).close()
        store.complete(trace, Manifest())
        store.pack(trace, [folder.batch(step)], records=records)
        assert not folder.batch(step).exists()
    found = replayed(trainer_launcher, spoiled, 4)
    assert (found.begun_at, found.difference) == (2, None)


def test_a_flipped_bit_of_a_weight_differs_in_its_step(spoiled, trainer_launcher):
    file = spoiled / "batches" / "000003-00.safetensors"
    arrays = load_file(file)
    weights = arrays["column.weight"]
    at = int(np.flatnonzero(weights)[0])
    weights.view(np.uint64)[at] ^= np.uint64(1 << 50)  # by a quarter at least
    header = json.loads(file.read_bytes()[8:][: int.from_bytes(file.read_bytes()[:8], "little")])
    save_file(arrays, file, header["__metadata__"])
    assert replayed(trainer_launcher, spoiled, 2).difference is None
    for step in (3, 4):  # step 4 is trained from the checkpoint of step 2, so by way of step 3
        found = replayed(trainer_launcher, spoiled, step).difference
        assert found is not None
        assert (found.step, found.number, found.rank) == (3, 3, 0)
        assert found.count > 40


def test_one_other_digest_is_named_with_its_rank(spoiled, trainer_launcher, capsys):
    file = update_log.file_of(spoiled, 1)
    lines = file.read_text().splitlines()
    line = json.loads(lines[2])
    name = sorted(line["gradients"])[0]
    line["gradients"][name] = "vd1:" + 32 * "0"
    lines[2] = json.dumps(line)
    file.write_text("".join(f"{text}\n" for text in lines))
    found = replayed(trainer_launcher, spoiled, 3).difference
    assert found is not None
    assert (found.step, found.rank, found.name, found.count) == (3, 1, name, 1)
    assert found.losses[0] == found.losses[1]


def test_the_command_takes_the_config_from_the_run(sft, spoiled, trainer_launcher, monkeypatch, capsys):
    monkeypatch.setattr("verifier.runs.resources.ForkLauncher", lambda **_: nullcontext(trainer_launcher))
    assert command(["train", "--replay", str(sft), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert said == "gradients of step 3: 47 tensors, bitwise as recorded (from the checkpoint of step 2)\n"
    file = update_log.file_of(spoiled, 0)
    file.write_text(file.read_text().replace('"vd1:', '"vd1:0'))
    assert command(["train", str(CONFIG), *SFT, "--replay", str(spoiled), "--step", "3"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("gradients of step 3: not as recorded (from the checkpoint of step 2): first `")
    assert "on rank 0, and " in said


def test_a_profile_changes_no_bit_and_is_of_the_step_and_rank_asked_for(sft, trainer_launcher, tmp_path):
    import gzip

    assert [file.name for file in (sft / "profiles").iterdir()] == ["step-3-rank-0.json.gz"]
    trace = json.loads(gzip.decompress((sft / "profiles" / "step-3-rank-0.json.gz").read_bytes()))
    assert any("backward" in str(event.get("name", "")).lower() for event in trace["traceEvents"])
    run = tmp_path / "run"
    Trainer(config_of(run, SFT, CONFIG), print, launcher=trainer_launcher).run()
    for file in (sft / "hf_model").glob("*.safetensors"):
        assert file.read_bytes() == (run / "hf_model" / file.name).read_bytes()
    lines = [[item.gradients for item in update_log.read(folder, 0)] for folder in (sft, run)]
    assert lines[0] == lines[1]
