"""How `ci/gpu` shares GPUs out, lets what is timed wait its turn, and sums up: no GPU is needed to know."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest

from tests.h100 import turn
from tests.h100.lanes import (
    LEAST_CORES,
    SHARED_GIB,
    SHARERS,
    SPREAD_SHARERS,
    STILL_RUNNING,
    Host,
    Run,
    Task,
    startable,
    urgency,
)
from tests.h100.results import table
from tests.meta.sources import ROOT

INNER = """
import pytest

from tests.h100.conftest import measured, pytest_runtest_makereport

@pytest.fixture(scope="session")
def rows():
    found = []
    yield found
    print("ROWS", [(row["test"], row["value"], row["passed"]) for row in found])
"""
INNER_TESTS = """
def test_holds(measured):
    measured(value=1)

def test_breaks_after_it_measured(measured):
    measured(value=2)
    assert False
"""


def task(gpus: int = 1, *, timed: bool = False, gib: float = SHARED_GIB, **own: bool) -> Task:
    return Task(file=Path("test_x.py"), gpus=gpus, timed=timed, gib=gib, **own)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def host_with(num_gpus: int, *running: tuple[Task, list[int]]) -> Host:
    host = Host(num_gpus, 141.0)
    for item, gpus in running:
        started(host, item, gpus)
    return host


def started(host: Host, item: Task, gpus: list[int]) -> list[int]:
    """Its cores; no process is needed for that."""
    cores = host.cores(item)
    host.running.append(Run(process=None, task=item, gpus=gpus, cores=cores))  # type: ignore[arg-type]
    host.num_started += 1
    return cores


def test_the_least_shared_gpus_are_taken() -> None:
    host = host_with(4, (task(), [0]), (task(2), [1, 2]), (task(), [1]))
    assert host.place(task()) == [3]
    assert host.place(task(2)) == [0, 3]
    assert host.place(task(4)) == [0, 1, 2, 3]


def test_a_full_gpu_takes_nobody_and_what_is_timed_does_not_count() -> None:
    full = [(task(), [0])] * SHARERS
    assert host_with(1, *full).place(task()) is None
    assert host_with(2, *full).place(task()) == [1]
    assert host_with(2, *full).place(task(2)) is None
    spread = [(task(2), [0, 1])] * SPREAD_SHARERS
    assert host_with(4, *spread[1:]).place(task(4)) == [0, 1, 2, 3]
    assert host_with(4, *spread).place(task(4)) is None
    assert host_with(4, *spread).place(task(2)) == [2, 3]
    assert host_with(1, *spread).place(task()) == [0]
    assert host_with(1, *full[1:], (task(timed=True), [0])).place(task()) == [0]


def test_a_gpu_takes_who_its_memory_has_room_for() -> None:
    host = host_with(2, (task(gib=100), [0]), (task(gib=30), [0]), (task(gib=80), [1]))
    assert host.place(task(gib=61)) == [1]
    assert host.place(task(gib=62)) is None
    assert host.place(task(2, gib=11)) == [0, 1]
    assert host.place(task(2, gib=12)) is None
    assert host_with(1).place(task(gib=200)) == [0]


def test_own_gpus_are_shared_with_nobody() -> None:
    alone = task(own_gpus=True)
    assert host_with(2, (task(), [0])).place(alone) == [1]
    assert host_with(1, (task(), [0])).place(alone) is None
    assert host_with(2, (alone, [0])).place(task()) == [1]
    assert host_with(2, (alone, [0])).place(task(2)) is None
    assert host_with(1, (alone, [0])).place(task(timed=True)) == [0]
    assert host_with(2, (task(quiet=True), [0])).place(alone) == [1]


def test_who_needs_a_quiet_host_is_beside_such_alone() -> None:
    quiet = task(quiet=True)
    host = host_with(4, (task(own_gpus=True), [0]), (quiet, [1]))
    assert host.place(task(2, quiet=True)) == [2, 3]
    assert host.place(task()) is None
    assert host.place(task(timed=True)) is None
    assert len(host.running[1].cores) == 64
    assert host_with(1, (quiet, [0])).place(quiet) is None


def test_no_more_run_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert host_with(2, *[(task(), [0])] * 3).place(task()) == [1]
    assert host_with(2, *[(task(), [0])] * 4).place(task()) is None


def test_what_needs_a_quiet_host_or_most_room_starts_first() -> None:
    kinds = [task(timed=True), task(2), task(4), task(quiet=True), task(own_gpus=True), task(2, quiet=True)]
    kinds.append(task(4, gib=60))
    order = sorted(kinds, key=urgency)
    assert [kinds.index(item) for item in order] == [5, 3, 4, 6, 2, 1, 0]
    assert startable(order) == order[:3]


def test_a_stage_waits_for_the_start_of_the_one_before() -> None:
    quiet = [task(quiet=True), task(own_gpus=True)]
    others = [task(2), task()]
    timed = [task(timed=True), task(2, timed=True)]
    assert startable([*quiet, *others, *timed]) == quiet
    assert startable([*others, *timed]) == others
    assert startable(timed) == timed
    assert startable([]) == []


def test_what_is_timed_starts_when_few_others_run() -> None:
    others = [(task(), [0])] * (STILL_RUNNING + 1)
    assert host_with(2, *others).place(task(2, timed=True)) is None
    assert host_with(2, *others[1:]).place(task(2, timed=True)) == [0, 1]
    assert host_with(2, *others).untimed
    assert not host_with(2, (task(timed=True), [0])).untimed


def test_cores_are_shared_evenly_and_by_no_group_and_all_are_given_to_what_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 16 cores four processes fill the host; of the fifteen on one GPU none shares all of its cores with another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    host = host_with(1)
    shares = [started(host, task(), [0]) for _ in range(4)]
    assert sorted(core for share in shares for core in share) == list(range(16))
    assert host.cores(task(timed=True)) == list(range(16))
    shares += [started(host, task(), [0]) for _ in range(11)]
    assert max(len(set(one) & set(other)) for one, other in combinations(shares, 2)) < LEAST_CORES
    users = [sum(core in share for share in shares) for core in range(16)]
    assert max(users) - min(users) <= 1
    del host.running[0]
    assert set(host.cores(task())) & set(shares[0])


def test_one_at_a_time_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody before the lanes let go; then one after the other."""
    path = tmp_path / "turn"
    monkeypatch.setenv(turn.TURN, str(path))
    inside: list[int] = []
    most: list[int] = []

    def measure(index: int) -> None:
        with turn.alone():
            inside.append(index)
            most.append(len(inside))
            time.sleep(0.2)
            inside.remove(index)

    with path.open("w") as lanes:
        fcntl.flock(lanes, fcntl.LOCK_EX)
        threads = [threading.Thread(target=measure, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        assert most == []
        fcntl.flock(lanes, fcntl.LOCK_UN)
        for thread in threads:
            thread.join(20)
    assert most == [1, 1, 1]


def test_who_never_gets_a_turn_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "turn"
    monkeypatch.setenv(turn.TURN, str(path))
    monkeypatch.setattr(turn, "WAIT_S", 0.3)
    with path.open("w") as lanes:
        fcntl.flock(lanes, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"the other GPU tests went on for 0\.3 s"), turn.alone():
            pass


def test_rows_say_whether_their_test_passed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(INNER)
    (tmp_path / "test_inner.py").write_text(INNER_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "ROWS [('test_holds', 1, True), ('test_breaks_after_it_measured', 2, False)]" in done.stdout


def test_the_table_counts_what_passed(tmp_path: Path) -> None:
    """A row is written before its test ends, so a fault may be caught and not healed, and a trip may not hold."""
    trip = {"transport": "ipc", "mismatch": [0.01, 0.1], "noise_mean": 0.02}
    fault = {"fault": "a", "first_bad_stage": "engine"}
    rows = [
        {"test": "trip[1]", "passed": True, **trip},
        {"test": "trip[2]", "passed": False, **trip},
        {"test": "fault[1]", "passed": True, "caught": ["ENG001"], **fault},
        {"test": "fault[2]", "passed": False, "caught": ["ENG001"], **fault},
        {"test": "fault[3]", "passed": False, "caught": [], **fault},
        {"test": "export[1]", "mesh": "tp2", "bitwise": 7},
    ]
    record = {"machine": ["H200"], "not_held": {"export[1]": "why"}, "rows": rows}
    (tmp_path / "h200-x1.json").write_text(json.dumps(record))
    (tmp_path / "h200-x1-shared.json").write_text(json.dumps({**record, "rows": rows[-1:]}))
    assert table(tmp_path).splitlines() == [
        "| what | 1 H200 | 1 H200, shared |",
        "| --- | --- | --- |",
        "| exports, bitwise the source; tensors | 0 of 1; 7 | 0 of 1; 7 |",
        "| round trips by NCCL and IPC that hold; mean mismatch over noise | 1 of 2; 0.50 |  |",
        "| injected bugs caught; in their own stage and healed | 2 of 3; 1 of 3 |  |",
    ]
