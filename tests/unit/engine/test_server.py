"""The engine's server and its client over a real socket, with an engine that computes nothing.

What this does not exercise: loading a model, and the server's process (tests/dist/test_engine_process.py).
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verifier.engine import server
from verifier.engine.api import EngineConfig, Poisoned, Sample, Sampling
from verifier.engine.client import EngineClient, EngineGone
from verifier.errors import InternalError, UsageError
from verifier.transport.wire import TransferFailed

CONFIG = EngineConfig(kind="hf", checkpoint="none")


class StillEngine:
    """Answers with what it was asked."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.asked: list[str] = []

    def num_ranks(self) -> int:
        return 2

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """NaN for every token."""
        return [[math.nan for _ in tokens] for tokens in sequences]

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Sample]]:
        """Each prompt as its own sample."""
        return [[Sample(tokens=tuple(tokens), logprobs=(-0.5,), cached_tokens=3)] for tokens in prompts]

    def poison(self) -> list[list[Poisoned]]:
        """Fail in the transport."""
        raise TransferFailed("transfer rank 1 left")

    def finish_update(self, version: int) -> None:
        """Fail as upstream code does."""
        raise RuntimeError("shape '[2]' is\n  invalid")

    def call(self, function: str, arguments: list[Any]) -> list[Any]:
        """Wait until told to go on."""
        self.asked.append(function)
        assert self.may_go_on.wait(20)
        return arguments

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture
def engine() -> StillEngine:
    return StillEngine()


@pytest.fixture
def socket_path(tmp_path: Path, engine: StillEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(server, "load", lambda config, failures: engine)
    yield serving(tmp_path)
    engine.may_go_on.set()


def serving(folder: Path) -> Path:
    path = folder / "socket"
    found = server.EngineServer(str(path))
    threading.Thread(target=found.run, args=(CONFIG,), daemon=True).start()
    return path


def test_answers_come_back_typed(socket_path: Path) -> None:
    client = EngineClient(socket_path, deadline_s=20)
    assert client.wait_ready(20) == 2
    assert math.isnan(client.logprobs([[1], [2, 3]])[1][1])
    ((sample,),) = client.generate([[7, 8]], Sampling(max_tokens=4, seed=0))
    assert (sample.tokens, sample.logprobs) == ((7, 8), (-0.5,))


def test_errors_come_back_as_themselves_and_the_engine_lives(socket_path: Path) -> None:
    client = EngineClient(socket_path, deadline_s=20)
    with pytest.raises(TransferFailed, match=r"^transfer rank 1 left$"):
        client.poison()
    with pytest.raises(InternalError, match=r"failed in `finish_update`: RuntimeError: shape '\[2\]' is invalid"):
        client.finish_update(1)
    with pytest.raises(InternalError, match="knows no request `dance`"):
        client.ask("dance")
    assert client.wait_ready(20) == 2


def test_requests_of_a_connection_are_answered_in_their_order(socket_path: Path, engine: StillEngine) -> None:
    client, other = EngineClient(socket_path, deadline_s=20), EngineClient(socket_path, deadline_s=20)
    pending = [client.start("call", list[int], function=str(number), arguments=[number]) for number in range(3)]
    engine.may_go_on.set()
    assert other.call("other") == []
    assert [answer() for answer in pending] == [[0], [1], [2]]
    assert [name for name in engine.asked if name != "other"] == ["0", "1", "2"]


def test_who_gives_up_waiting_disturbs_nobody(socket_path: Path, engine: StillEngine) -> None:
    client = EngineClient(socket_path, deadline_s=0.2, name="the oracle")
    with pytest.raises(InternalError, match=r"^the oracle did not answer `call` within 0.2 s$"):
        client.call("f")
    with pytest.raises(EngineGone, match="was closed before the request"):
        client.wait_ready(1)
    engine.may_go_on.set()
    assert EngineClient(socket_path, deadline_s=20).wait_ready(20) == 2


def test_who_knows_the_key_is_let_in_by_a_network(socket_path: Path) -> None:
    place = EngineClient(socket_path, deadline_s=20).ask("listen", str, host="127.0.0.1")
    host, _, port = place.partition("@")[2].rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"\0\0\0\2{}")
        assert EngineClient(place, deadline_s=20).wait_ready(20) == 2
    with pytest.raises(EngineGone, match=rf"does not listen at {host}:{port}: digest"):
        EngineClient(f"{'0' * 64}@{host}:{port}")


def test_an_engine_that_could_not_be_loaded_says_why_to_everyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: EngineConfig, failures: object) -> None:
        raise UsageError("no checkpoint directory at none")

    monkeypatch.setattr(server, "load", refuse)
    path = serving(tmp_path)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^no checkpoint directory at none$"):
            EngineClient(path, deadline_s=20).wait_ready(20)


def test_nobody_listens(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("".join(f"line {number}\n" for number in range(20)))
    with pytest.raises(EngineGone) as caught:
        EngineClient(tmp_path / "socket")
    first, *words = str(caught.value).splitlines()
    assert first.endswith("socket: No such file or directory; its last words:")
    assert words == [f"line {number}" for number in range(8, 20)]
