"""Processes of a GRPO run with a live vLLM that are killed: nothing is left, and the same command ends the run.

Each process, in each stage of a step, under Ray and without it. A stage is recognised by the files that it begins with.
The continued run has the bits of one that nothing interrupted.

What this does not exercise: a loaded machine, several nodes, and modes that sample ahead, which a stop changes
(docs/limits.md).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.launch.keeper import descendants

STEPS = 6
KNOBS = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05", "evaluation.num_problems=0", "checkpoint.every=2",
    "checkpoint.keep=9",
)  # fmt: skip
AT = 4
"""Step in which a process is killed; the checkpoint of step 2 is whole by then."""
LEFT_S = 15.0
"""Seconds after which nothing may be left."""
START_S = 300.0


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


STAGES: dict[str, Callable[[Path], bool]] = {
    "rollout": lambda run: _lines(run / "metrics.jsonl") >= AT - 1,
    "step": lambda run: (run / "batches" / f"{AT:06d}-00.safetensors").exists(),
    "sync": lambda run: _lines(run / "ranks" / "0000.jsonl") >= AT,
    "save": lambda run: (run / "checkpoints" / f"{AT:06d}.partial").exists(),
}
"""Stage -> whether it has begun."""
RAY = ("driver", "raylet", "trainer actor", "engine actor", "launcher", "rank", "engine worker")
PLAIN = ("driver", "launcher", "rank", "engine worker")
TRIALS = [
    *(("ray", victim, stage) for victim in RAY for stage in STAGES),
    *(("plain", victim, stage) for victim in PLAIN for stage in STAGES),
]
RAY_KNOBS = {"ray": ("ray.use=true",), "plain": ()}


def command(run: Path, *knobs: str) -> list[str]:
    return [sys.executable, "-m", "verifier", "train", *KNOBS, *knobs, "--run", str(run)]


def text_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(run: Path) -> dict[str, object]:
    """Weights, and what the metrics say of each step but for its seconds."""
    found: dict[str, object] = {file.name: file.read_bytes() for file in (run / "hf_model").glob("*.safetensors")}
    assert found
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return found | {"steps": [(line["step"], line["loss"], line["reward"]) for line in lines]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, object]:
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(run), cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return ended(run)


def victim_of(name: str, driver: int) -> int:
    """Process id of a victim among the descendants of a driver."""
    if name == "driver":
        return driver
    tree = {pid: text_of(pid) for pid in descendants(driver)}
    words = {
        "raylet": "/raylet ", "trainer actor": "ray::TrainerNode", "engine actor": "ray::EngineNode",
        "launcher": "fork_server:serve", "rank": "fork_server:serve", "engine worker": "EngineCore",
    }  # fmt: skip
    found = [pid for pid, text in tree.items() if words[name] in text]
    assert found, "\n".join(f"{pid} {text[:200]}" for pid, text in tree.items())
    return found[-1] if name == "rank" else found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "victim", "stage"), TRIALS)
def test_nothing_is_left_and_the_same_command_ends_with_the_same_bits(how, victim, stage, whole, tmp_path):
    run, knobs = tmp_path / "run", RAY_KNOBS[how]
    with subprocess.Popen(
        command(run, *knobs), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        until = time.monotonic() + START_S
        everything: set[int] = set()
        while not STAGES[stage](run):
            assert driver.poll() is None, driver.stdout.read()
            assert time.monotonic() < until
            time.sleep(0.002)
        killed = victim_of(victim, driver.pid)
        everything = {driver.pid, *descendants(driver.pid)}
        os.kill(killed, signal.SIGKILL)
        printed = driver.communicate(timeout=90)[0]
        assert driver.returncode == (-signal.SIGKILL if victim == "driver" else 3), printed
        until = time.monotonic() + LEFT_S
        while (left := [pid for pid in everything if alive(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, {pid: text_of(pid)[:200] for pid in left}
    again = subprocess.run(command(run, *knobs), cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert again.returncode == 0, again.stdout + again.stderr
    assert ended(run) == whole
