"""Jobs on ranks that join no process group: results, every way to end, and hangs that the flight recorder shows.

What this does not exercise: torch's collectives (tests/dist/test_fork_launcher.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import alive
from verifier.errors import ContractError, InternalError
from verifier.launch import flight_recorder as flight
from verifier.launch import rank
from verifier.launch.child import Child
from verifier.launch.failures import CollectiveTimeout, JobTimeout, LaunchError, RankFailed
from verifier.launch.fork_launcher import ForkJob
from verifier.launch.fork_server import ForkServer
from verifier.launch.node_ranks import NodeRanks
from verifier.launch.rank import JobSpec, RankContext
from verifier.mesh.mesh import Mesh

OURS = "test_fork_job"


def preload() -> None:
    """Make ranks of this process join nothing, which needs torch."""
    rank._join = lambda *args: None


def say_and_return(context: RankContext) -> list[Any]:
    """Report progress, print, and return."""
    context.progress(f"rank {context.rank}")
    print(f"hello from {context.rank}")
    return [context.rank, context.world_size, context.args["text"] * 1_000_000]


def end_badly(context: RankContext) -> object:
    """Rank 1 ends as told; the others go on."""
    print("about to end badly", flush=True)
    if context.rank != 1:
        time.sleep(60)
    how = context.args["how"]
    if how == "lost peer":  # of ranks that fail at once, the one that lost its peer is not the cause
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    if how == "raise":
        raise ValueError("no such expert")
    if how == "ours":
        raise ContractError("chunk 3 is missing")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return object()


def lose_peers(context: RankContext) -> None:
    """Rank 1 fails; rank 0 has noticed that just before."""
    time.sleep(0.1 * context.rank)
    raise RuntimeError("Connection reset by peer") if context.rank == 0 else KeyError("layers.3")


def hang(context: RankContext) -> None:
    """All but the last wait in a collective."""
    everyone = flight.group_key("world", range(context.world_size))
    if context.rank < context.world_size - 1:
        with flight.label("w"):
            flight.RECORDER.wait(flight.RECORDER.enter(everyone, "all_reduce", "float32", (2, 3)))
    time.sleep(60)


def stop(context: RankContext) -> None:
    """All wait in a collective that every rank has entered; a signal stops rank 1 there."""
    everyone = flight.group_key("world", range(context.world_size))
    flight.RECORDER.wait(flight.RECORDER.enter(everyone, "all_reduce", "float32", (2, 3)))
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def sleep(context: RankContext) -> None:
    """Sleep beside a grandchild."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    context.progress(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    sys.path.insert(0, str(Path(__file__).parent))
    with ForkServer(f"{OURS}:preload", name="the process that forks ranks") as found:
        yield found
    sys.path.remove(str(Path(__file__).parent))


def job(server: ForkServer, function: str, run_dir: Path, reported: Any = None, **fields: Any) -> ForkJob:
    spec = JobSpec(function=f"{OURS}:{function}", run_dir=run_dir, **{"world_size": 2, **fields})
    return ForkJob([NodeRanks(server, spec)], spec, reported)


def sleepers(server: ForkServer, run_dir: Path) -> tuple[ForkJob, list[int]]:
    """A job of two ranks that sleep, and the processes of both and of what they started."""
    texts: list[str] = []
    found = job(server, "sleep", run_dir, lambda rank, text: texts.append(text))
    until = time.monotonic() + 20
    while len(texts) < 2 and time.monotonic() < until:
        assert not found.done
    return found, [int(pid) for text in texts for pid in text.split()]


def test_results_in_rank_order_logs_and_progress(server, tmp_path):
    texts = []
    folder = tmp_path / "new" / "folder"
    found = job(server, "say_and_return", folder, lambda *row: texts.append(row), world_size=3, args={"text": "abc"})
    assert found.wait() == [[rank, 3, "abc" * 1_000_000] for rank in range(3)]
    assert found.done
    assert sorted(texts) == [(rank, f"rank {rank}") for rank in range(3)]
    assert (folder / "rank002.log").read_text() == "hello from 2\n"


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: no such expert"),
        ("lost peer", "RuntimeError: Connection closed by peer [127.0.0.1]:1"),
        ("kill", "killed by SIGKILL (the kernel does this when memory runs out)"),
        ("unserialisable", "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_bad_end_of_one_rank_ends_the_job(server, tmp_path, how, cause):
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        job(server, "end_badly", tmp_path, args={"how": how}, mesh=Mesh(tp=2)).wait()
    assert time.monotonic() - began < 10
    error = caught.value
    assert (error.rank, error.place, error.cause) == (1, "tp=1 pp=0 ep=0 etp=0 cp=0 dp=0", cause)
    assert error.log_tail == "about to end badly\n"
    assert error.traceback in (tmp_path / "rank001.log").read_text()


def test_an_error_of_ours_comes_back_as_itself(server, tmp_path):
    with pytest.raises(ContractError, match=r"^chunk 3 is missing$") as caught:
        job(server, "end_badly", tmp_path, args={"how": "ours"}).wait()
    assert isinstance(caught.value.__cause__, RankFailed)


def test_a_rank_that_lost_its_peer_is_not_blamed(server, tmp_path):
    with pytest.raises(RankFailed, match=r"KeyError: 'layers.3'"):
        job(server, "lose_peers", tmp_path).wait()


def test_a_hang_names_who_did_not_come_and_where_it_is(server, tmp_path):
    with pytest.raises(CollectiveTimeout) as caught:
        job(server, "hang", tmp_path, world_size=3, collective_deadline_s=0.5).wait()
    error = caught.value
    assert (error.stall.op, error.stall.tensor, error.stall.arrived) == ("all_reduce", "`w` [2, 3] float32", (0, 1))
    (state,) = error.missing
    assert (state.rank, state.doing) == (2, "in no collective yet")
    assert state.frame.endswith("in hang")


def test_a_stopped_rank_is_named_though_it_has_arrived(server, tmp_path):
    with pytest.raises(CollectiveTimeout) as caught:
        job(server, "stop", tmp_path, world_size=3, collective_deadline_s=0.5).wait()
    error = caught.value
    assert (error.stall.arrived, error.stall.stopped) == ((0, 1, 2), (1,))
    assert "rank [1] is stopped by a signal (every rank arrived" in str(error)
    (state,) = error.missing
    assert (state.rank, state.doing.partition(";")[0]) == (1, "stopped by a signal, as SIGSTOP does")


def test_another_process_of_the_run_that_dies_ends_the_job(server, tmp_path):
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    child = Child(other.pid, other.wait)
    found, pids = sleepers(server, tmp_path)
    server.vigil.keep(child, lambda: InternalError(f"the oracle was {child.cause_of_death()}"))
    other.kill()
    began = time.monotonic()
    with pytest.raises(InternalError, match="the oracle was killed by SIGKILL"):
        found.wait()
    assert time.monotonic() - began < 2
    server.vigil.drop(child)
    assert gone(pids)


def test_a_job_past_its_deadline_says_where_its_ranks_are(server, tmp_path):
    with pytest.raises(JobTimeout) as caught:
        job(server, "sleep", tmp_path, deadline_s=4.0).wait()  # both start within it, whatever else runs on the host
    assert [state.frame.rpartition(" ")[2] for state in caught.value.states] == ["sleep"] * 2


def test_a_job_that_is_killed_takes_grandchildren_along_and_leaves_others_alone(server, tmp_path):
    other, others = sleepers(server, tmp_path / "other")
    found, pids = sleepers(server, tmp_path / "killed")
    found.kill()
    assert gone(pids)
    with pytest.raises(LaunchError, match="was ended on request"):
        found.wait()
    assert all(map(alive, others))
    other.kill()
    assert gone(others)


def test_a_function_that_is_not_there(server, tmp_path):
    spec = JobSpec(function="no_such_module:f", world_size=1, run_dir=tmp_path)
    with pytest.raises(RankFailed, match="No module named 'no_such_module'"):
        ForkJob([NodeRanks(server, spec)], spec).wait()


def test_the_death_of_the_fork_server_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with ForkServer(f"{OURS}:preload", name="the process that forks ranks") as server:
        found, pids = sleepers(server, tmp_path)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match=r"ended by itself \(killed by SIGKILL"):
            found.wait()
        assert gone(pids[::2])
    for pid in pids[1::2]:
        os.kill(pid, signal.SIGKILL)
