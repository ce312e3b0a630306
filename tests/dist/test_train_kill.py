"""A process of a GRPO run with a live vLLM is killed: nothing is left, and the same command ends the run.

Every process, in every stage of a step, under Ray or without it. A stage is recognised by the file that it begins
with. The continued run has the bits of one that nothing interrupted.

What this does not exercise: several nodes, GPUs, and modes that sample ahead, which a stop changes (docs/limits.md).
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
from tests.processes import alive, children, command_line
from verifier.launch.child import descendants

STEPS, AT = 6, 4
"""Steps of the run, and the one in which a process is killed; the checkpoint of step 2 is whole by then."""
KNOBS = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05", "evaluation.num_problems=0", "checkpoint.every=2",
)  # fmt: skip
LEFT_S = 15.0
"""Seconds after which no process may be left."""
RUN_S = 400.0
"""Seconds of a whole run, with the start of Ray and vLLM on a loaded machine."""


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


STAGES: dict[str, Callable[[Path], bool]] = {
    "rollout": lambda run: _lines(run / "metrics.jsonl") >= AT - 1,
    "step": lambda run: (run / "batches" / f"{AT:06d}-00.safetensors").exists(),
    "sync": lambda run: _lines(run / "ranks" / "0000.jsonl") >= AT,
    "save": lambda run: (run / "checkpoints" / f"{AT:06d}.partial").exists(),
}
"""Stage -> whether it has begun."""
OF_RAY = ("raylet", "trainer actor", "engine actor")
OF_BOTH = ("driver", "launcher", "rank", "engine worker")
PLAIN = ("rollout", "sync")
"""Stages in which the processes of every run are killed without Ray; in the others under it."""
VERIFIED = [(f"{victim} of a judged run", stage) for victim in ("driver", "judge") for stage in PLAIN]
TRIALS = [(victim, stage) for victim in (*OF_RAY, *OF_BOTH) for stage in STAGES] + VERIFIED
CODES = {
    "driver": {-signal.SIGKILL}, "driver of a judged run": {-signal.SIGKILL}, "engine actor": {0, 3},
    "engine worker": {0, 3}, "raylet": {0, 3},
}  # fmt: skip
"""Exit codes of the command, 3 by default. An engine may be started anew, with its actor. What Ray started ends some
seconds after its raylet, and the last steps may be done by then."""


def test_there_are_32_trials():
    assert len(TRIALS) == 32


def command(run: Path, ray: bool, verified: bool = False) -> list[str]:
    knobs = (*(("ray.use=true",) if ray else ()), *(("--verify", "verify.every=0") if verified else ()))
    return [sys.executable, "-m", "verifier", "train", *KNOBS, *knobs, "--run", str(run)]


def victim_of(name: str, driver: int) -> int:
    """Process id of a victim among the descendants of a driver.

    What a fork server forks has the server's command line.
    """
    name = name.removesuffix(" of a judged run")
    if name == "driver":
        return driver
    if name == "judge":
        return next(pid for pid in children(driver) if "spawn_main" in command_line(pid))
    tree = {pid: command_line(pid) for pid in descendants(driver)}

    def first(words: str) -> int:
        found = [pid for pid, text in tree.items() if words in text]
        assert found, "\n".join(f"{pid} {text[:200]}" for pid, text in tree.items())
        return found[0]

    if name == "rank":
        return children(first("preload_megatron:preload"))[0]
    if name == "engine worker":
        (engine,) = children(first("engine.server:preload"))
        return next(iter(children(engine)), engine)
    return first(
        {
            "raylet": "/raylet ", "trainer actor": "ray::TrainerNode", "engine actor": "ray::EngineNode",
            "launcher": "preload_megatron:preload",
        }[name]
    )  # fmt: skip


def ended(run: Path) -> dict[str, object]:
    """Weights, and loss and reward of each step."""
    found: dict[str, object] = {file.name: file.read_bytes() for file in (run / "hf_model").glob("*.safetensors")}
    assert found
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return found | {"steps": [(line["step"], line["loss"], line["reward"]) for line in lines]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, object]:
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(run, ray=False), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return ended(run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("victim", "stage"), TRIALS)
def test_nothing_is_left_and_the_same_command_ends_with_the_same_bits(victim, stage, whole, tmp_path):
    run, ray = tmp_path / "run", victim in OF_RAY or stage not in PLAIN
    words = command(run, ray, victim.endswith("judged run"))
    said = tmp_path / "said"
    with (
        said.open("wb") as output,
        subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as driver,
    ):
        until = time.monotonic() + RUN_S
        while not STAGES[stage](run):
            assert driver.poll() is None, said.read_text()
            assert time.monotonic() < until
            time.sleep(0.002)
        everything = [driver.pid, *descendants(driver.pid)]
        os.kill(victim_of(victim, driver.pid), signal.SIGKILL)
        code = driver.wait(RUN_S)
        assert code in CODES.get(victim, {3}), said.read_text()
        if victim.startswith("judge"):
            assert "the judge's process has ended: killed by SIGKILL" in said.read_text()
        until = time.monotonic() + LEFT_S
        while (left := [pid for pid in everything if alive(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, {pid: command_line(pid)[:200] for pid in left}
    if code:
        again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
        assert again.returncode == 0, again.stdout + again.stderr
    assert ended(run) == whole
