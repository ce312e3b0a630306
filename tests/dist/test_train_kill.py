"""A process of a GRPO run with a live vLLM is killed: nothing is left, and the same command ends the run.

Every process, in every stage of a step, under Ray or without it. A stage is recognised by the file that it begins
with. Drawn trials kill a process of a judged run, some time after a stage began, once or twice in a row. The continued
run has the bits of one that nothing interrupted.

What this does not exercise: several nodes, GPUs, and modes that sample ahead, which a stop changes (docs/limits.md).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.meta.sources import ROOT
from tests.processes import alive, children, command_line
from verifier.launch.child import descendants

STEPS, AT = 6, 4
"""Steps of the run, and the one in which a process is killed; the checkpoint of step 2 is whole by then."""
KNOBS = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05", "evaluation.num_problems=256", "evaluation.every=4",
    "checkpoint.every=2",
)  # fmt: skip
LEFT_S = 15.0
"""Seconds after which no process may be left."""
RUN_S = 400.0
"""Seconds of a whole run, with the start of Ray and vLLM on a loaded machine."""


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


STAGES: dict[str, Callable[[Path, Path], bool]] = {
    "rollout": lambda run, said: _lines(run / "metrics.jsonl") >= AT - 1,
    "step": lambda run, said: (run / "batches" / f"{AT:06d}-00.safetensors").exists(),
    "sync": lambda run, said: _lines(run / "ranks" / "0000.jsonl") >= AT,
    "evaluation": lambda run, said: f"step {AT}: evaluating" in said.read_text(),
    "save": lambda run, said: (run / "checkpoints" / f"{AT:06d}.partial").exists(),
    "export": lambda run, said: (run / "hf_model.partial").exists(),
}
"""Stage -> whether it has begun, by the run's folder and what the command printed."""
OVER: dict[str, Callable[[Path], bool]] = {
    "evaluation": lambda run: _lines(run / "metrics.jsonl") >= AT,
    "export": lambda run: (run / "hf_model").exists(),
}
"""Stage in which a drawn kill must hit -> whether it has ended."""
MOST_S = {"evaluation": 0.3, "export": 0.0}
"""Seconds after the beginning of a stage in which it is drawn, 1 by default; an export is short, and ends the run."""
OF_STEP = ("rollout", "step", "sync", "save")
OF_RAY = ("raylet", "trainer actor", "engine actor")
OF_BOTH = ("driver", "launcher", "rank", "engine worker")
PLAIN = ("rollout", "sync")
"""Stages in which the processes of every run are killed without Ray; in the others under it."""
VERIFIED = [(f"{victim} of a judged run", stage) for victim in ("driver", "judge") for stage in PLAIN]
TRIALS = [(victim, stage) for victim in (*OF_RAY, *OF_BOTH) for stage in OF_STEP] + VERIFIED
DRAWN = 40
"""Drawn trials of judged runs."""
CODES = {
    "driver": {-signal.SIGKILL}, "driver of a judged run": {-signal.SIGKILL}, "engine actor": {0, 3},
    "engine worker": {0, 3}, "raylet": {0, 3},
}  # fmt: skip
"""Exit codes of the command, 3 by default. An engine may be started anew, with its actor. What Ray started ends some
seconds after its raylet, and the last steps may be done by then."""


def test_there_are_32_trials_and_the_draws_begin_with_every_stage():
    assert len(TRIALS) == 32
    assert {drawn(seed)[1][0].stage for seed in range(DRAWN)} == set(STAGES)


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
        if not found:
            raise LookupError("\n".join(f"{pid} {text[:200]}" for pid, text in tree.items()))
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
    """Weights, and loss, reward and evaluation of each step."""
    found: dict[str, object] = {file.name: file.read_bytes() for file in (run / "hf_model").glob("*.safetensors")}
    assert found
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "reward", "accuracy", "held_out_reward", "held_out_version")
    return found | {"steps": [[line.get(name) for name in names] for line in lines]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, object]:
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(run, ray=False), cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return ended(run)


class Killed(NamedTuple):
    """A process that is killed `delay` seconds after a stage began."""

    victim: str
    stage: str
    delay: float = 0.0


def drawn(seed: int) -> tuple[bool, list[Killed]]:
    """Whether a judged run is under Ray, and what is killed in it, one after another."""
    chosen = random.Random(seed)
    ray = chosen.random() < 0.5
    victims = (*OF_BOTH, "judge", *(OF_RAY if ray else ()))
    kills = []
    for _ in range(chosen.choice((1, 1, 2))):
        victim, stage, delay = chosen.choice(victims), chosen.choice(list(STAGES)), chosen.uniform(0.0, 1.0)
        kills.append(Killed(victim, stage, delay * MOST_S.get(stage, 1.0)))
    return ray, kills


def interrupted(words: list[str], run: Path, killed: Killed, said: Path) -> tuple[int, bool]:
    """Run a command, kill a process of it, and return its exit code, and whether it was killed in its stage.

    Every process has ended within 15 seconds after the command.
    """
    found = False
    over = OVER.get(killed.stage, lambda run: False)
    with (
        said.open("wb") as output,
        subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as driver,
    ):
        everything: set[int] = set()
        until = time.monotonic() + RUN_S
        while not STAGES[killed.stage](run, said) and driver.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.002)
        time.sleep(killed.delay)
        while driver.poll() is None:
            everything |= {driver.pid, *descendants(driver.pid)}
            try:
                os.kill(victim_of(killed.victim, driver.pid), signal.SIGKILL)
            except (LookupError, StopIteration, ValueError):  # a run that was continued has not started it yet
                assert time.monotonic() < until
                time.sleep(0.05)
            else:
                found = not over(run)
                break
        code = driver.wait(RUN_S)
    until = time.monotonic() + LEFT_S
    while (left := [pid for pid in everything if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, {pid: command_line(pid)[:200] for pid in left}
    if killed.victim.startswith("judge") and code:
        assert "the judge's process has ended: killed by SIGKILL" in said.read_text()
    return code, found


def require_ended(words: list[str], run: Path, whole: dict[str, object]) -> None:
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert again.returncode == 0, again.stdout + again.stderr
    assert ended(run) == whole


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("victim", "stage"), TRIALS)
def test_nothing_is_left_and_the_same_command_ends_with_the_same_bits(victim, stage, whole, tmp_path):
    run, ray = tmp_path / "run", victim in OF_RAY or stage not in PLAIN
    words = command(run, ray, victim.endswith("judged run"))
    code, found = interrupted(words, run, Killed(victim, stage), tmp_path / "said")
    assert found
    assert code in CODES.get(victim, {3}), (tmp_path / "said").read_text()
    require_ended(words, run, whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(DRAWN))
def test_a_judged_run_that_is_killed_anywhere_ends_with_the_same_bits(seed, whole, tmp_path):
    ray, kills = drawn(seed)
    run = tmp_path / "run"
    words = command(run, ray, verified=True)
    for number, killed in enumerate(kills):
        said = tmp_path / f"said-{number}"
        code, found = interrupted(words, run, killed, said)
        assert found or number, killed  # a run that was continued may have ended before
        assert code in {0, 3, -signal.SIGKILL}, f"{kills}\n{said.read_text()}"
    require_ended(words, run, whole)
