"""Processes in which rewards and environments run, so that one that hangs, dies or raises is named and ended.

A regular expression that backtracks for ever holds Python's lock: only another process can be ended by a deadline.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NamedTuple

import msgspec

from verifier.core.seal import NO_SEAL, seal_of_reward
from verifier.environments.environment import SINGLE, open_environment
from verifier.errors import UsageError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed, limited, spawned
from verifier.launch.child import resolve
from verifier.rewards.sessions import Sessions

REWARDS = {
    "answer": "verifier.rewards.answer:answer_reward",
    "math_verify": "verifier.rewards.math_verify:math_verify_reward",
    "reasoning_gym": "verifier.rewards.reasoning_gym:reasoning_gym_reward",
    "verifiers": "verifier.environments.verifiers_episodes:verifiers_reward",
}
"""Name -> function; any other reward is named "package.module:function"."""
_START_S = 60.0
_MOST = 8
"""Processes, unless a config asks for more."""


class Reply(NamedTuple):
    """Answer of an environment to a turn."""

    messages: Sequence[Mapping[str, str]]
    done: bool


class EpisodeHandle(NamedTuple):
    """An episode under way with an environment."""

    process: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """Arguments of a reward."""

    id: str
    """Rollout, for errors."""
    completion: str
    """Text of the last turn."""
    row: Mapping[str, Any]
    """Row of the data, as JSON has it."""
    session: EpisodeHandle | None = None
    """Its episode; None where no environment plays."""

    @property
    def answer(self) -> str:
        """Gold answer, empty where there is none."""
        return self.row.get("answer") or ""


class _Request(NamedTuple):
    """Something to be asked of a process."""

    name: str
    """Method of `Sessions`."""
    arguments: tuple[Any, ...]
    where: str
    """End of a sentence that names what it is about."""
    process: int | None = None
    """Number of the process that has the episode; None for any."""


class _Answer(msgspec.Struct, array_like=True):
    """Answer of a process to a request, as it is sent, or why there is none."""

    value: Any = None
    seal: int = NO_SEAL
    """Seal of a reward, as the process took it."""
    failure: str = ""
    """Sentence; as it is sent, with WHERE in the place of what it is about, and without who failed."""
    is_usage: bool = False
    """The data or the config are wrong, which no reward of 0 mends."""


class RewardPool(contextlib.AbstractContextManager["RewardPool"]):
    """Processes that run a reward and an environment; a context manager, to be kept over many steps.

    Args:
        reward: a key of `REWARDS`, or "package.module:function".
        environment: name of the environment; "single" for none.
        processes: their number; by default that of the cores, 8 at most.
        deadline_s: seconds for one reward, or for one turn of an environment.
        errors: "raise", or "zero": an episode whose reward or environment raises, dies, is late or gives no finite
            number has a reward of 0, and is counted.

    Attributes:
        function: that the processes run as the reward, as they say themselves.
        made_by: what made the environment, "package.module:Class"; empty for none.

    Raises:
        UsageError: no such reward or environment, or it cannot be imported within 60 s.
    """

    def __init__(
        self, reward: str, environment: str = SINGLE, processes: int | None = None, deadline_s: float = 30.0,
        errors: str = "raise",
    ) -> None:  # fmt: skip
        if reward not in REWARDS and ":" not in reward:
            raise UsageError(f"unknown reward `{reward}`: give {', '.join(REWARDS)} or package.module:function")
        self._reward, self._who, self._errors = reward, f"environment `{environment}`", errors
        count = processes or min(_MOST, len(os.sched_getaffinity(0)))
        self._processes = [_Process(reward, environment, deadline_s) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count)
        self._failed, self._begun = set[EpisodeHandle](), 0
        self.failures = 0
        """Rewards that were counted as 0 since the last call of `take_failures`."""
        self.seals: Sequence[int] = ()
        """Seals of the rewards of the last call of `score`, as the processes took them."""
        try:
            (self.function, self.made_by), *_ = self._threads.map(_Process.hello, self._processes)
        except BaseException:
            self.close()
            raise

    def begin(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[EpisodeHandle]:
        """Begin episodes; those before are forgotten."""
        self._failed.clear()
        self._all([_Request("forget", (), "at its start", at) for at in range(len(self._processes))])
        sessions = []
        for _ in rows:
            self._begun += 1
            sessions.append(EpisodeHandle(self._begun % len(self._processes), self._begun))
        asked = [
            _Request("reset", (own.number, row, seed), f"on row `{row.get('id', '')}`", own.process)
            for own, row, seed in zip(sessions, rows, seeds, strict=True)
        ]
        for own, found in zip(sessions, self._all(asked, self._who), strict=True):
            if found.failure:
                self._fail(own)
        return sessions

    def step(self, sessions: Sequence[EpisodeHandle], turns: Sequence[str], names: Sequence[str]) -> list[Reply]:
        """Answer a turn of each of some episodes, which `names` call by their rows."""
        going = [at for at, own in enumerate(sessions) if own not in self._failed]
        asked = [
            _Request("step", (sessions[at].number, turns[at]), f"on row `{names[at]}`", sessions[at].process)
            for at in going
        ]
        replies = [Reply((), True)] * len(sessions)
        for at, found in zip(going, self._all(asked, self._who), strict=True):
            if found.failure:
                self._fail(sessions[at])
            else:
                replies[at] = Reply(*found.value)
        return replies

    def score(self, episodes: Sequence[ScoredEpisode]) -> list[float]:
        """Rewards of episodes, in order.

        Raises:
            UsageError: names the reward and the rollout: it raised, died, took too long or gave no finite number, and
                `errors` is "raise", or the gold answer is none.
        """
        going = [at for at, own in enumerate(episodes) if own.session not in self._failed]
        asked = []
        for at in going:
            own = episodes[at]
            number = None if own.session is None else own.session.number
            where = f"on rollout `{own.id}`"
            process = None if own.session is None else own.session.process
            asked.append(_Request("score", (number, own.row, own.completion), where, process))
        given = dict(zip(going, self._all(asked, f"reward `{self._reward}`"), strict=True))
        self.failures += sum(bool(item.failure) for item in given.values())
        found = [item if (item := given.get(at)) and not item.failure else None for at in range(len(episodes))]
        self.seals = [
            item.seal if item else seal_of_reward(own.completion, own.answer, 0.0)
            for own, item in zip(episodes, found, strict=True)
        ]
        return [float(item.value) if item else 0.0 for item in found]

    def take_failures(self) -> int:
        """Number of rewards that were counted as 0 since the last call."""
        found, self.failures = self.failures, 0
        return found

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, session: EpisodeHandle) -> None:
        self._failed.add(session)
        self.failures += 1

    def _all(self, requests: Sequence[_Request], who: str = "") -> list[_Answer]:
        """Answers to requests, in order, each by the process that has its episode, or by the next free one."""
        found: dict[int, _Answer] = {}
        own = [deque[int]() for _ in self._processes]
        common = deque[int]()
        for at, request in enumerate(requests):
            (common if request.process is None else own[request.process]).append(at)

        def work(process: _Process, mine: deque[int]) -> None:
            while True:
                try:
                    at = mine.popleft() if mine else common.popleft()
                except IndexError:
                    return
                found[at] = answer = process.ask(requests[at], who)
                if answer.failure and (answer.is_usage or self._errors == "raise"):
                    common.clear()
                    return

        list(self._threads.map(work, self._processes, own))
        for _, answer in sorted(found.items(), key=lambda item: item[0]):
            if answer.failure and (answer.is_usage or self._errors == "raise"):
                raise UsageError(answer.failure)
        return [found[at] for at in range(len(requests))]


class _Process:
    """One of the processes; it is started again where it was ended."""

    def __init__(self, reward: str, environment: str, deadline_s: float) -> None:
        self._arguments = [REWARDS.get(reward, reward), environment]
        self._name, self._deadline_s = reward, deadline_s
        self._open = contextlib.ExitStack()
        self._channel: Channel | None = None
        self._start()

    def hello(self) -> tuple[str, str]:
        """Wait until it has imported all; the reward's function and the environment's maker, as it says."""
        found = self._receive(time.monotonic(), _START_S, "at its start", f"reward `{self._name}`")
        if found.failure:
            raise UsageError(found.failure)
        function, made_by = found.value
        return function, made_by

    def ask(self, request: _Request, who: str) -> _Answer:
        """Answer of the process to a request; it is ended where none comes in time."""
        if self._channel is None:
            self._start()
            try:
                self.hello()
            except UsageError as error:
                return _Answer(failure=str(error), is_usage=True)
        assert self._channel is not None
        began = time.monotonic()
        limited(self._channel.wire, self._deadline_s, socket.SO_SNDTIMEO)
        try:
            self._channel.send([request.name, msgspec.to_builtins(request.arguments)])
        except DeadlinePassed:
            return self._late(self._deadline_s, request.where, who)
        except ChannelClosed:
            return self._ended(request.where, who)
        return self._receive(began, self._deadline_s, request.where, who)

    def close(self) -> None:
        """End it."""
        self._channel = None
        self._open.close()

    def _start(self) -> None:
        self._log = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack does
        self._child, self._channel = spawned(
            "verifier.rewards.scorer:serve", self._arguments, self._log, death_signal=signal.SIGKILL
        )
        self._open.callback(self._channel.close)
        self._open.callback(self._child.stop)

    def _receive(self, began: float, within_s: float, where: str, who: str) -> _Answer:
        assert self._channel is not None
        try:
            found = msgspec.convert(self._channel.receive(began + within_s - time.monotonic()), _Answer)
        except DeadlinePassed:
            return self._late(within_s, where, who)
        except ChannelClosed:
            return self._ended(where, who)
        if " WHERE" in found.failure:
            found.failure = f"{who} {found.failure.replace(' WHERE', f' {where}', 1)}"
        return found

    def _late(self, within_s: float, where: str, who: str) -> _Answer:
        self.close()
        late = f"{who} did not return within {within_s:g} s {where}: mend it, or raise grpo.reward_timeout_s"
        return _Answer(failure=late)

    def _ended(self, where: str, who: str) -> _Answer:
        cause = self._child.cause_of_death() if self._child.ended(5.0) else "closed its channel"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        said = words[-1].removeprefix("verifier.errors.UsageError: ") if words and cause == "exit status 1" else cause
        self.close()
        return _Answer(failure=f"{who} failed {where}: {said}")


def serve(descriptor: str, function: str, environment: str) -> None:
    """The process: load reward and environment, say so, answer each request."""
    channel = Channel(connection.Connection(int(descriptor)))
    reward = resolve(function)
    try:
        made, path = (None, "") if environment == SINGLE else open_environment(environment)
    except UsageError as error:
        channel.send(msgspec.to_builtins(_Answer(failure=str(error))))
        return
    sessions = Sessions(reward, made)
    channel.send(msgspec.to_builtins(_Answer(value=(function, path))))
    with contextlib.suppress(ChannelClosed):
        while True:
            channel.send(msgspec.to_builtins(_answered(sessions, *channel.receive())))


def _answered(sessions: Sessions, name: str, arguments: Sequence[Any]) -> _Answer:
    try:
        value = getattr(sessions, name)(*arguments)
    except Exception as error:  # a user's code may raise anything
        told = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        return _Answer(failure=f"failed WHERE: {told}", is_usage=isinstance(error, UsageError))
    if name != "score":
        return _Answer(value=value)
    if (number := _finite(value)) is None:
        return _Answer(failure=f"gave {repr(value)[:60]} WHERE: a reward is a finite number")
    _, row, completion = arguments
    return _Answer(value=number, seal=seal_of_reward(completion, row.get("answer"), number))


def _finite(value: object) -> float | None:
    """The finite number that a reward gave, of whatever type that counts as one; None for anything else."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
