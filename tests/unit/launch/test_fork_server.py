"""The fork server with children that need nothing heavy: what they get, how they end, and what its owner is told.

What this does not exercise: ranks and engines (tests/dist/test_fork_launcher.py, test_engine_fork_server.py).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import alive
from verifier.errors import ContractError, InternalError, UsageError
from verifier.launch.channel import Channel, ChannelClosed
from verifier.launch.fork_server import ForkServer

HERE = str(Path(__file__).parent)
OURS = "test_fork_server"


def preload() -> None:
    """Leave a mark that children inherit."""
    os.environ["VERIFIER_TEST_IMPORTS"] = os.environ.get("VERIFIER_TEST_IMPORTS", "") + "1"


def refuse() -> None:
    """Refuse as a preload."""
    raise UsageError("megatron-core 0.1 is installed, 0.19.2 is needed")


def stall() -> None:
    """Load for longer than anybody waits."""
    time.sleep(60)


def answer(channel: Channel, fd: int, number: int) -> None:
    """Send what the child has got, and its group; then print, and exit as told."""
    leads = os.getpgid(0) == os.getpid() == os.getsid(0)
    channel.send([os.environ["VERIFIER_TEST_IMPORTS"], os.read(fd, 10).decode(), leads])
    print("last line")
    sys.exit(number)


def sleep(channel: Channel) -> None:
    """Start a grandchild, say who they are, and sleep."""
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    channel.send([os.getpid(), grandchild.pid])
    time.sleep(60)


def gone(*pids: int) -> bool:
    """Whether all these end within 10 s."""
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture
def server(importable: None) -> Iterator[ForkServer]:
    with ForkServer(f"{OURS}:preload", name="the process that forks") as found:
        yield found


def test_a_child_gets_imports_descriptors_arguments_and_a_session(server: ForkServer, tmp_path: Path) -> None:
    for number in (0, 7):
        read, write = os.pipe()
        os.write(write, b"shared")
        child, channel = server.fork(f"{OURS}:answer", {"number": number}, log_path=tmp_path / "log", fds=[read])
        os.close(read)
        assert channel.receive(20) == ["1", "shared", True]
        assert child.cause_of_death() == f"exit status {number}"
        child.stop()
        with pytest.raises(ChannelClosed):
            channel.receive(5)
    assert (tmp_path / "log").read_text() == "last line\nlast line\n"


def test_a_stopped_child_takes_its_group_along(server: ForkServer, tmp_path: Path) -> None:
    child, channel = server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")
    pids = channel.receive(20)
    assert not child.ended()
    assert child.pid == pids[0]
    child.stop(0.5)
    assert child.ended()
    assert gone(*pids)


def test_closing_it_ends_all_children(server: ForkServer, tmp_path: Path) -> None:
    pids = [server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")[1].receive(20) for _ in range(2)]
    pid = server.pid
    server.close()
    assert gone(pid, *pids[0], *pids[1])
    with pytest.raises(ContractError, match="is not running: use it in a with block"):
        _ = server.pid


def test_one_that_was_closed_starts_again(server: ForkServer, tmp_path: Path) -> None:
    first = server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")[1].receive(20)
    server.close()
    again = server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")[1].receive(20)
    assert gone(*first)
    assert all(map(alive, again))


def test_its_own_death_is_told_with_its_last_words(server: ForkServer, tmp_path: Path) -> None:
    child, channel = server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")
    pids = channel.receive(20)
    os.kill(server.pid, signal.SIGKILL)
    assert gone(pids[0])
    assert child.cause_of_death() is None
    with pytest.raises(InternalError, match=r"the process that forks ended by itself \(killed by SIGKILL"):
        server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")
    os.kill(pids[1], signal.SIGKILL)


def test_a_preload_that_refuses(importable: None) -> None:
    with ForkServer(f"{OURS}:refuse", name="the process that forks") as server:
        server.start()
        with pytest.raises(UsageError, match=r"^megatron-core 0.1 is installed, 0.19.2 is needed$"):
            server.wait_ready()


def test_who_finds_it_dead_first_says_why_the_preload_refused(importable: None) -> None:
    with ForkServer(f"{OURS}:refuse", name="the process that forks") as server:
        server.start()
        with pytest.raises(UsageError, match=r"^megatron-core 0.1 is installed, 0.19.2 is needed$"):
            server.vigil.wait([], 30)


@pytest.mark.parametrize("preload", ["no_such_module:f", "json:absentee"])
def test_a_preload_that_is_not_there(importable: None, preload: str) -> None:
    with ForkServer(preload, name="the process that forks") as server:
        server.start()
        with pytest.raises((InternalError, UsageError), match=r"No module named|no function `absentee`"):
            server.wait_ready()


def test_a_preload_that_does_not_end_in_time(importable: None) -> None:
    with ForkServer(f"{OURS}:stall", name="the process that forks", load_deadline_s=0.5) as server:
        server.start()
        pid = server.pid
        with pytest.raises(InternalError, match=f"^the process that forks did not load {OURS}:stall within 0.5 s$"):
            server.wait_ready()
        assert gone(pid)


def test_a_child_that_fails_leaves_its_traceback_in_its_log(server: ForkServer, tmp_path: Path) -> None:
    child, _ = server.fork(f"{OURS}:answer", {"nothing": 1}, log_path=tmp_path / "log")
    assert child.cause_of_death() == "exit status 1"
    child.stop()
    assert "TypeError" in (tmp_path / "log").read_text()


def test_the_descriptor_of_a_child_becomes_readable_when_it_ends(server: ForkServer, tmp_path: Path) -> None:
    child, _ = server.fork(f"{OURS}:sleep", {}, log_path=tmp_path / "log")
    assert not select.select([child], [], [], 0)[0]
    child.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], 10)[0]
    assert child.cause_of_death() == "killed by SIGKILL (the kernel does this when memory runs out)"
    child.stop()
