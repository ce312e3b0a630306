"""A training run that is killed and started again ends with the bits of one that was not.

What this does not exercise: what the check on a load catches (tests/faults), and Megatron-FSDP.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import UsageError
from verifier.faults.training_trial import DeferredJudge
from verifier.launch.fork_launcher import ForkLauncher
from verifier.launch.rank import RankContext
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.trainer.checkpoint_folder import Checkpoints
from verifier.trainer.controller import Trainer
from verifier.trainer.loop import TrainSummary
from verifier.trainer.observer import SILENT
from verifier.trainer.ranks import WorkerSpec

CONFIG = ROOT / "configs" / "add-sft.yaml"
STEPS = 6
KNOBS = (f"steps={STEPS}", "data.batch_size=16", "evaluation.num_problems=0", "checkpoint.every=2")
FIRST, THIRD = 2e-6, 2e-5
"""Greatest distance of a loss on another mesh, nats: ranks add in another order, and steps let it grow (issue 16)."""


def train(launcher: ForkLauncher, run: Path, *knobs: str, within: Sequence[str] = ()) -> TrainSummary:
    given = {text.partition("=")[0] for text in knobs}
    kept = [text for text in KNOBS if text.partition("=")[0] not in given]
    config, _ = load(TrainConfig, file=CONFIG, overrides=[*kept, *knobs, f"run={run}"])
    observer = RunEvidence(DeferredJudge()) if config.verify.steps else SILENT
    return Trainer(config, print, observer, launcher=launcher, within=within).run()


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def ended(run: Path) -> dict[str, object]:
    """Exported weights, digests of all that each rank held at the last step, and losses."""
    last = run / "checkpoints" / f"{STEPS:06d}" / "saved"
    found: dict[str, object] = {file.name: file.read_bytes() for file in (run / "hf_model").glob("*.safetensors")}
    found |= {file.name: json.loads(file.read_text()) for file in last.iterdir()}
    return found | {"losses": losses(run)}


@pytest.fixture(scope="module")
def whole(trainer_launcher, tmp_path_factory) -> Path:
    """A run of two ranks that nothing interrupted, with all of its checkpoints."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(trainer_launcher, run, "checkpoint.keep=9")
    return run


@pytest.fixture
def stopped(whole, tmp_path) -> Path:
    """The same run as if it had been stopped after step 5: its last checkpoint is of step 4."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "000006")
    shutil.rmtree(run / "hf_model")
    (run / "finished.json").unlink()
    return run


@pytest.mark.slow
def test_checkpoints_are_written_and_the_last_ones_kept(whole, trainer_launcher, tmp_path):
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["000002", "000004", "000006"]
    train(trainer_launcher, tmp_path / "run", "steps=5", "checkpoint.every=1", "checkpoint.keep=2")
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["000004", "000005"]


def test_a_stopped_run_goes_on_bitwise_and_its_load_is_judged(stopped, whole, trainer_launcher):
    summary = train(trainer_launcher, stopped, "verify.steps=true")
    assert summary.resumed_from == 4
    assert ended(stopped) == ended(whole)
    report = report_of(store.read(stopped / "steps" / "000005"), "")
    verdicts = {outcome.code: outcome.verdict for outcome in report.outcomes}
    assert (report.exit_code, verdicts["CKP001"]) == (0, Verdict.HOLDS)
    later = report_of(store.read(stopped / "steps" / "000006"), "")
    assert later.exit_code == 0


def test_a_finished_run_says_so_and_more_steps_go_on(stopped, trainer_launcher):
    train(trainer_launcher, stopped)
    assert train(trainer_launcher, stopped).finished_before
    summary = train(trainer_launcher, stopped, f"steps={STEPS + 1}")
    assert (summary.resumed_from, len(losses(stopped))) == (STEPS, STEPS + 1)


@pytest.mark.parametrize("knob", ["seed=2", "optimizer.learning_rate=0.5", "data.batch_size=8"])
def test_another_config_is_refused_by_the_name_of_the_knob(stopped, trainer_launcher, knob):
    with pytest.raises(UsageError, match=f"holds a run with {knob.partition('=')[0]}="):
        train(trainer_launcher, stopped, knob)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("mesh.tp=2", "mesh.dp=1"), ("mesh.dp=1",)], ids=["tp2", "one rank"])
def test_another_mesh_goes_on_with_the_next_losses(stopped, whole, trainer_launcher, mesh):
    for step in (4, 6):
        shutil.rmtree(stopped / "checkpoints" / f"{step:06d}", ignore_errors=True)
    assert train(trainer_launcher, stopped, *mesh, "verify.steps=true", "verify.every=0").resumed_from == 2
    report = report_of(store.read(stopped / "steps" / "000003"), "")
    verdicts = {outcome.code: outcome.verdict for outcome in report.outcomes}
    assert (report.exit_code, verdicts["CKP001"]) == (0, Verdict.HOLDS)
    gaps = [abs(one - other) for one, other in zip(losses(stopped), losses(whole), strict=True)]
    assert gaps[:2] == [0.0, 0.0]
    assert gaps[2] <= FIRST
    assert gaps[4] <= THIRD


@pytest.mark.slow
def test_async_equals_sync_by_content(whole, trainer_launcher, tmp_path):
    run = tmp_path / "run"
    train(trainer_launcher, run, "checkpoint.keep=9", "checkpoint.asynchronous=true")
    assert ended(run) == ended(whole)
    for step in (2, 4, 6):
        for part in ("megatron", "saved"):
            one, other = (folder / "checkpoints" / f"{step:06d}" / part for folder in (run, whole))
            assert contents(one) == contents(other), f"{part} of step {step}"


def contents(folder: Path) -> dict[str, object]:
    """Tensors and objects of a checkpoint of megatron-core by key, or bytes of other files."""
    if folder.name != "megatron":
        return {file.name: file.read_bytes() for file in folder.iterdir()}
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    found: dict[str, object] = {}
    for index, place in metadata.storage_data.items():
        raw = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        is_object = isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
        found[f"{index.fqn} {index.offset} {'object' if is_object else ''}"] = raw
    return found


def test_cut_at_any_byte_the_checkpoint_before_it_loads(whole, tmp_path):
    draw = random.Random(5)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=9)
    for step in (4, 6):
        shutil.copytree(whole / "checkpoints" / f"{step:06d}", checkpoints.path(step))
    files = sorted(file for file in checkpoints.path(6).rglob("*") if file.is_file())
    assert last(checkpoints) == 6
    for file in [*files, *draw.choices(files, k=30)]:
        bytes_before = file.read_bytes()
        offset = draw.randrange(len(bytes_before))
        flipped = bytes([bytes_before[offset] ^ 1 << draw.randrange(8)])
        for spoiled in (bytes_before[:offset], bytes_before[:offset] + flipped + bytes_before[offset + 1 :]):
            file.write_bytes(spoiled)
            assert last(checkpoints) == 4, f"{file.name} at {offset}"
        file.unlink()
        assert last(checkpoints) == 4, f"{file.name} removed"
        file.write_bytes(bytes_before)
    (checkpoints.path(6) / "more").touch()
    assert last(checkpoints) == 4


def last(checkpoints: Checkpoints) -> int:
    state, _ = checkpoints.last_whole()
    assert state is not None
    return state.step


def test_a_disk_that_is_full_leaves_the_checkpoint_before(stopped, trainer_launcher):
    with pytest.raises(UsageError, match=r"cannot be written, .* continues from the checkpoint before"):
        train(trainer_launcher, stopped, within=("tests.dist.test_train_resume:short_files",))
    assert last(Checkpoints(stopped / "checkpoints", keep=9)) == 4
    assert train(trainer_launcher, stopped).resumed_from == 4


@contextlib.contextmanager
def short_files(spec: WorkerSpec, context: RankContext) -> Iterator[None]:
    """In a rank: files may not be longer than the kernel lets them, as on a disk without space."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    yield


def command(run: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "verifier", "train", str(CONFIG), *KNOBS, "--run", str(run), *words]


def killed(run: Path, step: int, delay_s: float) -> None:
    """Run the command, and kill it some time after its metrics have a step."""
    file, until = run / "metrics.jsonl", time.monotonic() + 300
    with subprocess.Popen(command(run), cwd=ROOT, stdout=-3, stderr=-3) as process:
        while process.poll() is None and not (file.exists() and len(file.read_bytes().splitlines()) >= step):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_sigkill_and_the_same_command_end_bitwise(whole, tmp_path):
    run = tmp_path / "run"
    killed(run, 3, 0.1)
    done = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "continued from step 2" in done.stdout
    assert ended(run) == ended(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_sigkill_at_a_drawn_moment(whole, tmp_path, number):
    draw, run = random.Random(number), tmp_path / "run"
    killed(run, draw.randrange(STEPS + 1), draw.uniform(0, 1))
    if number % 2:  # and again, while it continues
        killed(run, draw.randrange(STEPS + 1), draw.uniform(0, 1))
    done = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ended(run) == ended(whole)
