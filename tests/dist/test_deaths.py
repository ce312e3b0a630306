"""A process that dies at a drawn moment of a round trip is named with its signal within 2 s; nothing is left behind.

What this does not exercise: GPUs, and a death of the command itself (tests/dist/test_fork_launcher.py).
"""

from __future__ import annotations

import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes import alive, arguments, children, said
from verifier.model.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
NAMED_S = 2.0
"""From the kill to the sentence."""
BESIDE_OTHERS_S = 15.0
"""The same where another worker of a suite computes on the same two cores; alone 2 s hold (`-m slow`)."""
START_S = 240.0
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
SAID = {
    "launcher": "the process that forks ranks ended by itself (killed by {}",
    "rank": "rank {rank} (tp={rank} pp=0 ep=0 etp=0 cp=0 dp=0) failed: killed by {}",
    "forker": "the process that forks engines ended by itself (killed by {}",
    "engine": "the engine's process ended by itself (killed by {}",
    "worker": "the engine's process ended by itself (its worker VllmWorker-0 was killed by {}",
    "oracle": "the fp32 oracle's process ended by itself (killed by {}",
    "second engine": "the second engine's process ended by itself (killed by {}",
}
"""First line on stderr, by the process that was killed."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_tiny("qwen3", folder / "verifier", "float32")
    return folder


class Run:
    """A round trip, and the processes that it has started so far, by what they are."""

    def __init__(self, folder: Path, cache: Path, engine: str) -> None:
        folder.mkdir(parents=True)
        self._temporary = Path(tempfile.mkdtemp(prefix="kill-"))  # a socket's path has room for 107 bytes
        environment = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(self._temporary), "PYTHONPATH": str(ROOT)}
        command = ["roundtrip", "--model", "tiny:qwen3", "--tp", "2", "--cycles", "1", "--engine", engine]
        self.command = subprocess.Popen(
            [sys.executable, "-m", "verifier", *command, "--trace", str(folder / "trace")],
            cwd=folder, env={**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.seen: dict[int, str] = {}

    def look(self) -> dict[str, int]:
        """Processes that are alive: what they are -> process id. Ranks are "rank 0" and "rank 1"."""
        for child in children(self.command.pid):
            words = arguments(child)
            if "verifier.engine.server:main" in words:
                second = json.loads(words[-2])["checkpoint"].endswith("exported")
                what = "second engine" if second else "oracle" if "engine" in self.seen.values() else "engine"
                self.seen.setdefault(child, what)
            elif "verifier.runs.session_megatron:preload" in words:
                self.seen.setdefault(child, "launcher")
                for rank, pid in enumerate(sorted(children(child))):
                    self.seen.setdefault(pid, f"rank {rank}")
            elif "verifier.engine.server:preload" in words:
                self.seen.setdefault(child, "forker")
                for host in children(child):
                    self.seen.setdefault(host, "second engine" if "oracle" in self.seen.values() else "engine")
                    for worker in children(host):
                        self.seen.setdefault(worker, "worker")
        return {what: pid for pid, what in self.seen.items() if alive(pid)}

    def wait_for(self, what: str) -> int:
        """Process id of a process, once there is one."""
        until = time.monotonic() + START_S
        while what not in (found := self.look()):
            assert self.command.poll() is None, f"it ended before there was a {what}"
            assert time.monotonic() < until
            time.sleep(0.02)
        return found[what]

    def sentence(self) -> tuple[str, float]:
        """First line on stderr that is no progress, and when."""
        assert self.command.stderr is not None
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(self.command.stderr, selectors.EVENT_READ)
                assert selector.select(60), "nothing was said"
            if said(line := self.command.stderr.readline().decode()):
                return line, time.monotonic()

    def left(self) -> list[str]:
        """Processes and temporary files that outlive the command."""
        until = time.monotonic() + 5
        while any(map(alive, self.seen)) and time.monotonic() < until:
            time.sleep(0.02)
        found = [what for pid, what in self.seen.items() if alive(pid)]
        return found + [path.name for path in self._temporary.glob("verifier-*")]

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.command.kill()
        self.command.communicate()
        shutil.rmtree(self._temporary, ignore_errors=True)


def kill(
    folder: Path, cache: Path, engine: str, what: str, signum: int, delay_s: float, within_s=NAMED_S
) -> float | None:
    """Kill a process so many seconds after it has appeared; seconds to the sentence, None if it came after its work."""
    run = Run(folder, cache, engine)
    try:
        pid = run.wait_for(what)
        until = time.monotonic() + delay_s
        while time.monotonic() < until:
            run.look()
            time.sleep(0.02)
        if run.look().get(what) != pid:
            return None
        os.kill(pid, signum)
        killed = time.monotonic()
        line, said = run.sentence()
        if not line and run.command.wait(60) == 0:  # its owner needed it no more, and was ending it
            return None
        expected = SAID[what.rpartition(" ")[0] if what.startswith("rank") else what]
        expected = expected.format(signal.Signals(signum).name, rank=what[-1])
        assert line.removeprefix("verifier: ").startswith(expected), line
        assert said - killed < within_s
        assert run.command.wait(60) == 3
        assert run.left() == []
        return said - killed
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "signum", "delay_s"),
    [("launcher", signal.SIGKILL, 0.5), ("rank 1", signal.SIGSEGV, 2.0), ("engine", signal.SIGKILL, 2.0)],
)
def test_the_first_processes_of_a_round_trip(tmp_path, cache, what, signum, delay_s):
    assert kill(tmp_path / "run", cache, "hf", what, signum, delay_s, BESIDE_OTHERS_S) is not None


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_thirty_kills_at_drawn_moments(tmp_path, cache, number):
    """Every fifth with vLLM; a process that ends before its moment is drawn again."""
    draw = random.Random(f"death {number}")
    engine = "vllm" if number % 5 == 0 else "hf"
    of_engine = ["forker", "engine", "worker"] if engine == "vllm" else ["engine"]
    whom = ["launcher", "rank 0", "rank 1", "oracle", "second engine", *of_engine]
    for attempt in range(6):
        what, signum = whom[(number + attempt) % len(whom)], draw.choice(SIGNALS)
        took = kill(tmp_path / str(attempt), cache, engine, what, signum, draw.uniform(0.0, 6.0))
        if took is not None:
            print(f"{what} by {signum.name} with {engine}: named after {took:.2f} s")
            return
    raise AssertionError("every process had ended before its moment")
