"""Training runs on a machine that lacks something: one sentence, nothing lost, and the bits of a run that lacks none.

A full disk, no inodes, 2 GiB of memory, 256 open files, a clock that jumps, a second run in the folder, a model with
weights that are not finite, a rank that is stopped, a process of a checkpoint's writers that is killed.

What this does not exercise: GPUs, and several hosts.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from tests.processes import children, command_line, said
from verifier.launch.child import descendants
from verifier.model.tiny import write_tiny

pytestmark = pytest.mark.slow

RUN_S = 200.0
NAMED_S = 15.0
"""Seconds within which a run names a process that was stopped or killed."""
KNOBS = (
    "model=tiny:add", "algorithm=sft", "steps=6", "data.source=arithmetic", "data.batch_size=8", "batch.max_tokens=512",
    "evaluation.num_problems=8", "evaluation.every=2", "checkpoint.every=2", "verify.every=0",
)  # fmt: skip
MEMORY = Path("/sys/fs/cgroup/memory")
JUMPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *found) {
  static int (*get)(clockid_t, struct timespec *);
  static const long hours[] = {0, 26, -49, 0, 8760, -1};
  struct timespec now;
  if (!get) get = dlsym(RTLD_NEXT, "clock_gettime");
  int code = get(clock, found);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && !get(CLOCK_MONOTONIC, &now))
    found->tv_sec += 3600 * hours[now.tv_sec % 6];
  return code;
}
int gettimeofday(struct timeval *found, void *zone) {
  struct timespec now;
  int code = clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec, found->tv_usec = now.tv_nsec / 1000;
  return code;
}
time_t time(time_t *found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
"""
"""Another time of day each second, by up to a year; what counts durations is left alone."""


def command(run: Path, *knobs: str) -> list[str]:
    given = {text.partition("=")[0] for text in knobs}
    kept = [text for text in KNOBS if text.partition("=")[0] not in given]
    return [sys.executable, "-m", "verifier", "train", *kept, *knobs, "--verify", "--run", str(run)]


def trained(run: Path, *knobs: str, **given: object) -> dict[str, bytes]:
    done = subprocess.run(command(run, *knobs), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, **given)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all hold" in done.stdout
    return weights(run)


def weights(run: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in (run / "hf_model").glob("*.safetensors")}
    assert found
    return found


@contextlib.contextmanager
def under_way(words: list[str], run: Path, steps: int, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command whose run has taken so many steps."""
    with (
        output.open("wb") as stream,
        subprocess.Popen(words, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT) as driver,
    ):
        try:
            metrics, until = run / "metrics.jsonl", time.monotonic() + RUN_S
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
                assert driver.poll() is None, output.read_text()
                assert time.monotonic() < until
                time.sleep(0.002)
            yield driver
        finally:
            driver.kill()


def ranks_of(driver: int) -> list[int]:
    return children(next(pid for pid in descendants(driver) if "preload_megatron:preload" in command_line(pid)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return trained(tmp_path_factory.mktemp("whole") / "run")


def _zeros(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 16))


def _names(folder: Path) -> None:
    for number in range(10_000):
        (folder / f"{number}").touch()


@pytest.fixture(params=[("size=200m", _zeros), ("nr_inodes=3000", _names)], ids=["bytes", "inodes"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A small file system, and what fills it; skips where this user may not mount."""
    folder, (options, fill) = tmp_path / "disk", request.param
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=30)
    if mounted.returncode:
        pytest.skip(f"a full disk needs a file system of its own: {mounted.stderr.strip()}")
    yield folder, fill
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.mark.parametrize("step", [1, 3])
def test_a_disk_that_fills_up_under_way_loses_nothing(
    disk: tuple[Path, Callable[[Path], None]], step: int, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder, fill = disk
    run, filler, output = folder / "run", folder / "filler", tmp_path / "output"
    filler.mkdir()
    with under_way(command(run), run, step, output) as driver:
        with contextlib.suppress(OSError):
            fill(filler)
        assert driver.wait(RUN_S) == 4, output.read_text()
    last = output.read_text().strip().splitlines()[-1]
    assert last.startswith("verifier: "), output.read_text()
    assert "No space left on device" in last or "no space is left" in last or "cannot be written" in last
    shutil.rmtree(filler)
    assert trained(run) == whole


def test_a_second_run_in_a_folder_is_refused_and_the_first_ends_as_if_alone(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with under_way(command(run), run, 3, tmp_path / "killed"):
        pass
    with under_way(command(run), run, 3, tmp_path / "output") as driver:
        second = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
        assert (second.returncode, said(second.stderr)) == (
            4, f"verifier: the run folder `{run}` is in use by another run: choose another"
        )  # fmt: skip
        assert driver.wait(RUN_S) == 0, (tmp_path / "output").read_text()
    assert weights(run) == whole


def test_a_second_gate_in_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    words = [sys.executable, "-m", "verifier", "gate", "--model", "tiny:qwen3", "--kind", "golden", "--mesh", "tp=1"]
    with subprocess.Popen([*words, "--folder", str(folder)], cwd=ROOT, stdout=-1, stderr=-1, text=True) as first:
        until = time.monotonic() + RUN_S
        while not (folder / "gate.lock").exists():
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        second = subprocess.run([*words, "--folder", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=60)
        printed, complained = first.communicate(timeout=RUN_S)
    told = f"verifier: the folder `{folder}` is in use by another gate: choose another"
    assert (second.returncode, said(second.stderr)) == (4, told)
    assert (first.returncode, said(complained)) == (0, ""), printed
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 2


def test_a_run_of_256_open_files_has_the_same_bits(whole: dict[str, bytes], tmp_path: Path) -> None:
    few = (256, 256)
    assert trained(tmp_path / "run", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few)) == whole


@pytest.mark.skipif(shutil.which("cc") is None, reason="a clock that jumps needs a C compiler")
def test_a_clock_that_jumps_changes_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    source, library = tmp_path / "jumps.c", tmp_path / "jumps.so"
    source.write_text(JUMPS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    assert trained(tmp_path / "run", env={**os.environ, "LD_PRELOAD": str(library)}) == whole


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 2 GiB; skips where this user may not make one."""
    folder = MEMORY / f"verifier-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(2 << 30))
    except OSError as problem:
        pytest.skip(f"a limit of memory needs a control group: {problem}")
    yield folder
    until = time.monotonic() + 15
    while (folder / "cgroup.procs").read_text().strip() and time.monotonic() < until:
        time.sleep(0.1)
    folder.rmdir()


def test_a_run_of_2_gib_of_memory_has_the_same_bits(group: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    words = [*enter, *command(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path / "run") == whole


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("what", ["train", "roundtrip"])
def test_weights_that_are_not_finite_are_refused_by_name(what: str, value: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(write_tiny("add", tmp_path / "cache"), tmp_path / "model"))
    name = "model.layers.0.mlp.down_proj.weight"
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(-1)[5] = value
            save_file(tensors, file, metadata={"format": "pt"})
    words = {
        "train": command(tmp_path / "run", f"model={model}", "mesh.tp=2"),
        "roundtrip": [sys.executable, "-m", "verifier", "roundtrip", "--model", str(model), "--engine", "hf"],
    }[what]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S, env=_environment())
    assert done.returncode == 4, done.stdout + done.stderr
    assert said(done.stderr) == f"verifier: `{name}` of {model} has 1 values that are not finite: mend it"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_run_that_diverges_says_that_its_loss_is_not_a_number(tmp_path: Path) -> None:
    words = [word for word in command(tmp_path / "run", "optimizer.learning_rate=1e30") if word != "--verify"]
    for found in ("trained 6 steps: loss nan", "is finished already: 6 steps, loss nan"):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
        assert (done.returncode, found in done.stdout) == (0, True), done.stdout + done.stderr


def test_a_rank_that_is_stopped_is_named_and_goes_on(whole: dict[str, bytes], tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    with under_way(command(run, "mesh.dp=2", "steps=100000"), run, 3, output) as driver:
        rank = ranks_of(driver.pid)[1]
        os.kill(rank, signal.SIGSTOP)
        until = time.monotonic() + NAMED_S
        while "trainer rank 1 (tp=0 pp=0 ep=0 etp=0 cp=0 dp=1) is stopped by a signal" not in output.read_text():
            assert time.monotonic() < until, output.read_text()
            time.sleep(0.1)
        os.kill(rank, signal.SIGCONT)
        size, until = (run / "metrics.jsonl").stat().st_size, time.monotonic() + RUN_S
        while (run / "metrics.jsonl").stat().st_size == size:
            assert driver.poll() is None, output.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)


def test_the_process_that_writers_of_checkpoints_report_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    knobs = ("checkpoint.asynchronous=true", "checkpoint.every=1", "steps=100000")
    with under_way(command(run, *knobs), run, 3, output) as driver:
        (rank,) = ranks_of(driver.pid)
        os.kill(min(children(rank)), signal.SIGKILL)
        assert driver.wait(NAMED_S) == 3, output.read_text()
    assert "the process that a checkpoint's writers report to has ended: killed by SIGKILL" in output.read_text()
    assert not [*tmp_path.glob("pymp-*")]
