"""Agreements over real sockets: all get the same, and nobody waits past the deadline or for one who left."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore

from verifier.transport import gloo
from verifier.transport.gloo import ControlChannel
from verifier.transport.wire import Address, TransferFailed

NUM_RANKS = 4


def served(folder: Path, deadline_s: float) -> FileStore:
    """A store of its own for each call: one that waits lets no other thread through."""
    store = FileStore(str(folder / "store"), -1)
    store.set_timeout(timedelta(seconds=deadline_s))
    return store


class Members:
    """All members' ends, each used by a thread of its own where they have to meet."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        stores = [served(folder, deadline_s) for _ in range(NUM_RANKS)]
        address = Address(host="127.0.0.1", store="", world_size=NUM_RANKS, deadline_s=deadline_s)
        self.ends = self.together(lambda rank: ControlChannel(stores[rank], rank, address))

    def together[T](self, act: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(NUM_RANKS) as threads:
            return list(threads.map(act, range(NUM_RANKS)))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    found = Members(tmp_path, 20)
    yield found
    for end in found.ends:
        end.close()


def test_all_get_all_messages_in_rank_order(members: Members) -> None:
    for turn in range(50):
        heard = members.together(lambda rank, turn=turn: members.ends[rank].propose(f"{turn} of {rank}")())
        assert all(step.messages == tuple(f"{turn} of {rank}" for rank in range(NUM_RANKS)) for step in heard)
        assert heard[0].dissenters == (1, 2, 3)
    assert all(step.reached for step in members.together(lambda rank: members.ends[rank].propose("same")()))


def test_agreements_end_in_the_order_in_which_they_were_proposed(members: Members) -> None:
    pending = [[end.propose(str(turn)) for turn in range(5)] for end in members.ends]
    heard = members.together(lambda rank: [hear().messages for hear in pending[rank]])
    assert heard == [[(str(turn),) * NUM_RANKS for turn in range(5)]] * NUM_RANKS


@pytest.mark.parametrize("silent", [0, 2])
def test_a_member_that_says_nothing_is_given_up(silent: int, tmp_path: Path) -> None:
    members = Members(tmp_path, 2)
    began = time.monotonic()

    def propose(rank: int) -> str:
        if rank == silent:
            return ""
        with pytest.raises(TransferFailed) as caught:
            members.ends[rank].propose("chunk 3")()
        members.ends[rank].close()
        return str(caught.value)

    said = members.together(propose)
    assert time.monotonic() - began < 10
    who = "the sender and the other engine ranks" if silent == 0 else "the engine's ranks"
    speaker = 1 if silent == 0 else 0
    assert said[speaker] == (
        f"transfer rank {speaker} waited up to 2 s with {who} for all ranks to say `chunk 3`: timed out"
    )


@pytest.mark.parametrize("gone", [0, 3])
def test_when_one_leaves_the_others_do_not_wait_for_the_deadline(members: Members, gone: int) -> None:
    began = time.monotonic()

    def propose(rank: int) -> None:
        if rank == gone:
            members.ends[rank].close()
            return
        with pytest.raises(TransferFailed, match=r"for all ranks to say `on`: a member|reset|pipe"):
            members.ends[rank].propose("on")()
        members.ends[rank].close()

    members.together(propose)
    assert time.monotonic() - began < 5
    with pytest.raises(TransferFailed, match="left it and cannot wait for all ranks to say `more`"):
        members.ends[gone].propose("more")


def test_a_member_that_never_joins_is_given_up(tmp_path: Path) -> None:
    store = served(tmp_path, 0.5)
    address = Address(host="127.0.0.1", store="", world_size=2, deadline_s=0.5)
    with pytest.raises(TransferFailed, match=r"waited up to 0\.5 s with the engine's ranks for the others to join"):
        ControlChannel(store, 0, address)


@pytest.mark.parametrize("manners", ["says something else", "leaves", "keeps silent"])
def test_a_stranger_at_the_door_is_turned_away(manners: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gloo, "_HELLO_S", 0.5)
    store, theirs = served(tmp_path, 20), served(tmp_path, 20)
    address = Address(host="127.0.0.1", store="", world_size=2, deadline_s=20)
    ends: dict[int, ControlChannel] = {}
    sender = threading.Thread(target=lambda: ends.update({0: ControlChannel(store, 0, address)}))
    sender.start()
    port = int(theirs.get("control port"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        if manners == "says something else":
            stranger.sendall(bytes(20))
        if manners == "leaves":
            stranger.close()
        ends[1] = ControlChannel(theirs, 1, address)
        sender.join(20)
        if manners != "leaves":
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    hear = ends[1].propose("in")
    assert ends[0].propose("in")().reached
    assert hear().reached
    for end in ends.values():
        end.close()


def test_a_crowd_of_silent_strangers_keeps_no_member_out(tmp_path: Path) -> None:
    """They would have kept a member out for 5 s each."""
    store, theirs = served(tmp_path, 20), served(tmp_path, 20)
    address = Address(host="127.0.0.1", store="", world_size=2, deadline_s=20)
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as crowd:
        joined = thread.submit(lambda: ControlChannel(store, 0, address))
        port = int(theirs.get("control port"))
        for _ in range(30):
            stranger = crowd.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(b"\0\0")  # half of a message's length
        began = time.monotonic()
        ours = ControlChannel(theirs, 1, address)
        joined.result(20).close()
        ours.close()
        assert time.monotonic() - began < 10
