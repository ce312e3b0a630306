"""Run the GPU tests side by side, a process for each file: `python -m tests.h100.lanes RESULTS [PYTEST ARGUMENT...]`.

A test that takes longer than the rest of its file (`@pytest.mark.own_process`) gets a process of its own. So does one
with a limit of minutes (`@pytest.mark.quiet`); these run before all others, on GPUs that no other uses. So does one
that fills its GPUs' memory (`@pytest.mark.own_gpus`), beside the quiet ones if a GPU is left. The others share a GPU
as far as its memory goes (`@pytest.mark.h100(gpus=1, gib=50)`). What is timed (`@pytest.mark.timed`) is measured at the
end, one process at a time: such a process starts, and imports, while the last others run, and then waits for its turn
(`tests/h100/turn.py`). Every process writes its log and its results into the folder; nothing is skipped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.h100.turn import TURN

HERE = Path(__file__).parent
NOTHING_COLLECTED = 5
SHARERS = 15
"""Processes that may share one GPU, whatever memory it has."""
SHARED_GIB = 7.0
"""Memory on each of its GPUs of a process whose tests name none: trainer, engine, oracle and their contexts."""
SPREAD_SHARERS = 6
"""Those of them that have several GPUs: a collective waits for the time slices of its process on all."""
STILL_RUNNING = 3
"""Processes that are not timed and still run when those that are start."""
LEAST_CORES = 4
"""Of each process that is not timed, or a quarter of the host's: with all, the threads of one wait for another's."""
OWN = ("own_process", "quiet", "own_gpus")
"""Markers of tests that get a process of their own."""
SPREAD = 7
"""Steps through the cores, so that processes which follow each other are given different ones."""
FINE_TUNED = "fine_tuned"
"""Folder among the results, while tests run: the model at which GRPO begins, made once, and those that it ends with."""
STARTS_APART_S = 1.0
"""Between two starts, so that the first finds its ports and compiles what the others then read from the cache."""


def named(visible: Sequence[int]) -> list[str]:
    """The GPUs that torch counts so, as a scheduler that gave this process some of the host's named them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",")] if given else []
    return [names[place] if names else str(place) for place in visible]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One pytest process."""

    file: Path
    gpus: int
    timed: bool
    test: str = ""
    """The only test, if so; all of the file's that need as many GPUs otherwise."""
    quiet: bool = False
    """True if others would make it too slow."""
    own_gpus: bool = False
    gib: float = SHARED_GIB
    """Memory that it takes at most on each of its GPUs, unless they are its own."""

    @property
    def alone(self) -> bool:
        """True if its GPUs are its own: by memory, or because two processes on one GPU wait for each other's slice."""
        return self.quiet or self.own_gpus

    @property
    def name(self) -> str:
        """Of its log and its results."""
        only = self.test.removeprefix("test_").replace("[", "-").rstrip("]")
        return f"{self.file.stem}-x{self.gpus}" + ("-timed" if self.timed else "") + (f"-{only}" if only else "")

    def start(
        self, results: Path, visible: Sequence[int], cores: Sequence[int], arguments: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        """Start it on these GPUs and cores; on fewer GPUs than it is for, its ranks share them."""
        wanted = f"h100(gpus={self.gpus}) and {'' if self.timed else 'not '}timed"
        wanted += "" if self.test else "".join(f" and not {marker}" for marker in OWN)
        tests = f"{self.file}::{self.test}" if self.test else str(self.file)
        with (results / f"{self.name}.log").open("wb") as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-s", "--tb=short", "--no-skip",
                    "--durations=0", "-m", wanted, tests, *arguments,
                ],
                stdout=log, stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": ",".join(named(visible)),
                    "VERIFIER_GPU_RESULTS": str(results / f"{self.name}.part"),
                    **({TURN: str(results / "turn")} if self.timed else {}),
                },
                preexec_fn=partial(os.sched_setaffinity, 0, cores),
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A process that was started."""

    process: subprocess.Popen[bytes]
    task: Task
    gpus: list[int]
    cores: list[int]


@dataclass(slots=True)
class Host:
    """Which processes run on which GPUs and cores."""

    num_gpus: int
    gib: float
    """Memory of each GPU."""
    running: list[Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_started: int = 0

    @property
    def untimed(self) -> list[Run]:
        """Those whose speed does not matter."""
        return [run for run in self.running if not run.task.timed]

    def place(self, task: Task) -> list[int] | None:
        """The least shared GPUs; None while there is no room, or too early for what is timed or would disturb."""
        if stage(task) and any(run.task.quiet for run in self.running):
            return None
        if task.timed:
            return list(range(task.gpus)) if len(self.untimed) <= STILL_RUNNING else None
        load = [sum(gpu in run.gpus for run in self.untimed) for gpu in range(self.num_gpus)]
        taken = {gpu for run in self.untimed if run.task.alone for gpu in run.gpus}
        if task.gpus > 1:
            spread = Counter(gpu for run in self.untimed if run.task.gpus > 1 for gpu in run.gpus)
            taken |= {gpu for gpu, num in spread.items() if num >= SPREAD_SHARERS}
        most = 1 if task.alone else SHARERS
        free = [
            gpu for gpu in range(self.num_gpus)
            if gpu not in taken and load[gpu] < most and (not load[gpu] or self._used(gpu) + task.gib <= self.gib)
        ]  # fmt: skip
        if len(free) < task.gpus or len(self.untimed) >= len(os.sched_getaffinity(0)):
            return None
        return sorted(sorted(free, key=lambda gpu: (load[gpu], gpu))[: task.gpus])

    def _used(self, gpu: int) -> float:
        return sum(run.task.gib for run in self.untimed if gpu in run.gpus)

    def cores(self, task: Task) -> list[int]:
        """All for what is timed or quiet; for the others those with the fewest users, seldom the same ones together.

        Groups that share their cores would leave them idle when most of a group is done.
        """
        every = sorted(os.sched_getaffinity(0))
        if task.timed or task.quiet:
            return every
        users = Counter(core for run in self.untimed for core in run.cores)
        turned = {core: (SPREAD * at + 3 * self.num_started) % len(every) for at, core in enumerate(every)}
        fewest = sorted(every, key=lambda core: (users[core], turned[core]))
        return sorted(fewest[: max(LEAST_CORES, len(every) // 4)])

    def start(self, task: Task, gpus: list[int], results: Path, arguments: Sequence[str]) -> None:
        """Start a process where it was placed."""
        cores = self.cores(task)
        self.running.append(Run(process=task.start(results, gpus, cores, arguments), task=task, gpus=gpus, cores=cores))
        self.num_started += 1

    def reap(self, results: Path) -> None:
        """Take in what has ended, and say how."""
        ended = [run for run in self.running if run.process.poll() is not None]
        self.running = [run for run in self.running if run not in ended]
        for run in ended:
            log = results / f"{run.task.name}.log"
            if run.process.returncode == NOTHING_COLLECTED:
                log.unlink()
                continue
            last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            print(f"{run.task.name}: {last}", flush=True)
            if run.process.returncode:
                self.failed.append(run.task.name)


class Census:
    """Learns from pytest which groups of tests there are."""

    def __init__(self) -> None:
        self._gib: dict[Task, float] = {}

    @property
    def tasks(self) -> list[Task]:
        """Each with the memory of its largest test."""
        return [replace(task, gib=gib) for task, gib in self._gib.items()]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest with every test that is left."""
        for item in session.items:
            asked = item.get_closest_marker("h100").kwargs
            gpus = asked["gpus"]
            timed = item.get_closest_marker("timed") is not None
            own = {name: item.get_closest_marker(name) is not None for name in OWN}
            task = Task(
                file=item.path, gpus=gpus, timed=timed, test=item.name if any(own.values()) else "",
                quiet=own["quiet"], own_gpus=own["own_gpus"],
            )  # fmt: skip
            self._gib[task] = max(self._gib.get(task, 0.0), asked.get("gib", SHARED_GIB))


def stage(task: Task) -> int:
    """0 for what needs a quiet host or GPUs of its own, 2 for what is timed, 1 for all others."""
    return 0 if task.alone else 1 + task.timed


def urgency(task: Task) -> tuple[Any, ...]:
    """Sorts what waits: by stage, then what needs a quiet host, then the most GPUs, then the most memory."""
    return stage(task), not task.quiet, -task.gpus, -task.gib, not task.test, task.file, task.test


def memory_gib() -> float:
    """Memory of the host's smallest GPU, without taking any of it."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    return min(map(int, done.stdout.split())) / 1024


def startable(waiting: Sequence[Task]) -> list[Task]:
    """Those that may start as soon as there is room: none of a stage before the last of the one before has started."""
    return [task for task in waiting if stage(task) == stage(waiting[0])]


def main(results: Path, arguments: Sequence[str]) -> int:
    """Run all; 1 if any failed."""
    num_gpus = torch.cuda.device_count()
    census = Census()
    arguments = ["--gpus", str(num_gpus), *arguments]
    pytest.main(["--collect-only", "-qq", "-m", "h100", str(HERE), *arguments], [census])
    waiting = sorted(census.tasks, key=urgency)
    host = Host(num_gpus, memory_gib())
    with (results / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        while waiting or host.running:
            host.reap(results)
            placed = ((task, host.place(task)) for task in startable(waiting))
            found = next(((task, gpus) for task, gpus in placed if gpus is not None), None)
            if found is not None:
                task, gpus = found
                waiting.remove(task)
                host.start(task, gpus, results, arguments)
            elif not host.untimed:
                fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(STARTS_APART_S)
    (results / "turn").unlink()
    shutil.rmtree(results / FINE_TUNED, ignore_errors=True)
    return 1 if host.failed or not census.tasks else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
