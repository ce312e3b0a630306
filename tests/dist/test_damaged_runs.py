"""A file of a run's folder is damaged, and the same command is given again: it ends with the right bits, or refuses.

Three hundred drawn damages: half of a judged run that was killed behind its second checkpoint, half of one that ended.
A refusal is exit code 4 and one sentence, and removes no checkpoint.

What this does not exercise: damage while a run writes, several damages at once, and runs with an engine.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from tests.processes import said

TRIALS = 300
RUN_S = 300.0
KNOBS = (
    "model=tiny:add", "algorithm=sft", "steps=6", "data.source=arithmetic", "data.batch_size=8", "batch.max_tokens=512",
    "evaluation.num_problems=8", "evaluation.every=2", "checkpoint.every=2", "verify.every=0",
)  # fmt: skip


def command(run: Path) -> list[str]:
    return [sys.executable, "-m", "verifier", "train", *KNOBS, "--verify", "--run", str(run)]


def weights(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((run / "hf_model").glob("*.safetensors"))}


def digests(folder: Path) -> dict[str, str]:
    """Digest of each plain file; what else a path is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or path.is_fifo():
            found[str(path.relative_to(folder))] = "special"
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("ended") / "run"
    done = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("killed") / "run"
    with subprocess.Popen(command(run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        until = time.monotonic() + RUN_S
        while not (run / "checkpoints" / "000004").exists():
            assert time.monotonic() < until
            assert driver.poll() is None
            time.sleep(0.002)
        os.kill(driver.pid, signal.SIGKILL)
    time.sleep(5)  # ranks and judge end with their driver
    return run


def _replaced(file: Path, made: Callable[[Path], None]) -> None:
    file.unlink()
    made(file)


def _flipped(file: Path, chosen: random.Random, outside: Path) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    file.write_bytes(content)


def _of_another(file: Path, chosen: random.Random, outside: Path) -> None:
    run = next(parent for parent in file.parents if parent.name == "run")
    others = [path for path in run.rglob(f"*{file.suffix}") if path.is_file() and path != file]
    shutil.copyfile(chosen.choice(sorted(others) or [outside / "theirs"]), file)


def _folder_is_a_link(file: Path, chosen: random.Random, outside: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.symlink_to(outside)


DAMAGES: dict[str, Callable[[Path, random.Random, Path], object]] = {
    "cut": lambda file, chosen, _: os.truncate(file, chosen.randrange(max(file.stat().st_size, 1))),
    "emptied": lambda file, _, __: os.truncate(file, 0),
    "one bit flipped": _flipped,
    "random bytes": lambda file, chosen, _: file.write_bytes(chosen.randbytes(file.stat().st_size)),
    "bytes behind its end": lambda file, chosen, _: file.write_bytes(file.read_bytes() + chosen.randbytes(9)),
    "removed": lambda file, _, __: file.unlink(),
    "a folder": lambda file, _, __: _replaced(file, Path.mkdir),
    "a pipe": lambda file, _, __: _replaced(file, os.mkfifo),
    "a link to a file elsewhere": lambda file, _, outside: _replaced(
        file, lambda path: path.symlink_to(outside / "theirs")
    ),
    "content of another file": _of_another,
    "its folder removed": lambda file, _, __: shutil.rmtree(file.parent),
    "its folder a link elsewhere": _folder_is_a_link,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_damaged_run_ends_with_the_right_bits_or_is_refused(seed, request, ended, tmp_path):
    chosen = random.Random(seed)
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(ended if seed % 2 else request.getfixturevalue("killed"), run)
    outside.mkdir()
    (outside / "theirs").write_text("a file of somebody else\n")
    # A folder is drawn first, so that the few files of checkpoints come as often as the many of records.
    groups: dict[str, list[Path]] = {}
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        groups.setdefault(file.relative_to(run).parts[0], []).append(file)
    file = chosen.choice(groups[chosen.choice(sorted(groups))])
    kind = chosen.choice([kind for kind in DAMAGES if not (file.parent == run and kind.startswith("its folder"))])
    what = f"{file.relative_to(run)}: {kind}"
    DAMAGES[kind](file, chosen, outside)
    before = digests(run / "checkpoints")
    try:
        done = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired as problem:
        pytest.fail(f"{what}\nno end within {RUN_S} s\n{(problem.stderr or b'').decode()}")
    told = f"{what}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert digests(outside) == {"theirs": hashlib.sha256(b"a file of somebody else\n").hexdigest()}, told
    assert done.returncode in {0, 4}, told
    if done.returncode == 0:
        assert weights(run) == weights(ended), told
    else:
        assert len(said(done.stderr).strip().splitlines()) == 1, told
        assert before == digests(run / "checkpoints"), told
