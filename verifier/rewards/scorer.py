"""Process of its own in which a reward function runs, so that one that hangs, dies or raises is named and ended.

A regular expression that backtracks for ever holds Python's lock: only another process can be ended by a deadline.
"""

from __future__ import annotations

import math
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from verifier.core.seal import seal_of_reward
from verifier.errors import UsageError
from verifier.launch.child import resolve, spawn

Reward = Callable[[str, str], float]
"""(completion, gold answer) -> reward."""
REWARDS = {
    "answer": "verifier.rewards.answer:answer_reward",
    "math_verify": "verifier.rewards.math_verify:math_verify_reward",
}
"""Name -> function; any other reward is named "package.module:function"."""
_START_S = 60.0
_PIECE = 1 << 16


class RewardProcess:
    """A running reward function; a context manager, to be kept over many steps.

    Args:
        name: a key of `REWARDS`, or "package.module:function".
        deadline_s: seconds for one completion.

    Attributes:
        function: that the process runs, as it says itself.

    Raises:
        UsageError: no such reward, or its module cannot be imported within 60 s.
    """

    def __init__(self, name: str, deadline_s: float = 30.0) -> None:
        if name not in REWARDS and ":" not in name:
            raise UsageError(f"unknown reward `{name}`: give {', '.join(REWARDS)} or package.module:function")
        self.name = name
        self.deadline_s = deadline_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        self._socket, theirs = socket.socketpair()
        self._rest, self._seals = b"", list[int]()
        with theirs:
            self._child = spawn(
                "verifier.rewards.scorer:serve", [REWARDS.get(name, name), str(theirs.fileno())], self._log,
                death_signal=signal.SIGKILL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        try:
            self.function = self._receive(time.monotonic(), _START_S, "at its start").decode()
        except BaseException:
            self.close()
            raise

    def score(self, ids: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Rewards of rollouts, in order.

        Args:
            ids: of the rollouts, for errors.
            completions: texts of the responses.
            answers: gold answers.

        Raises:
            UsageError: names the reward and the rollout: it raised, died, took too long or gave no finite number.
        """
        rewards = []
        for rollout, completion, answer in zip(ids, completions, answers, strict=True):
            where = f"on rollout `{rollout}`"
            began = time.monotonic()
            self._send(msgspec.json.encode((completion, answer)) + b"\n", where)
            reply = self._receive(began, self.deadline_s, where)
            value, said, seal = msgspec.json.decode(reply, type=tuple[float | None, str, int])
            if value is None:
                raise UsageError(f"reward `{self.name}` gave {said} {where}: a reward is a finite number")
            rewards.append(value)
            self._seals.append(seal)
        return rewards

    def take_seals(self) -> tuple[int, ...]:
        """Seals of all rewards since the last call, as the process made them."""
        found, self._seals = tuple(self._seals), []
        return found

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._child.stop()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, line: bytes, where: str) -> None:
        self._socket.settimeout(self.deadline_s)
        try:
            self._socket.sendall(line)
        except TimeoutError as error:
            raise self._late(self.deadline_s, where) from error
        except OSError as error:
            raise self._ended(where) from error

    def _receive(self, began: float, within_s: float, where: str) -> bytes:
        while b"\n" not in self._rest:
            self._socket.settimeout(max(began + within_s - time.monotonic(), 1e-3))
            try:
                piece = self._socket.recv(_PIECE)
            except TimeoutError as error:
                raise self._late(within_s, where) from error
            except OSError as error:
                raise self._ended(where) from error
            if not piece:
                raise self._ended(where)
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _late(self, within_s: float, where: str) -> UsageError:
        mend = "mend it, or give it longer"
        return UsageError(f"reward `{self.name}` did not return within {within_s:g} s {where}: {mend}")

    def _ended(self, where: str) -> UsageError:
        """The exception that ended it, as the last line of its log, or its cause of death."""
        cause = self._child.cause_of_death() if self._child.ended(5.0) else "closed its socket"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        said = words[-1].removeprefix("verifier.errors.UsageError: ") if words and cause == "exit status 1" else cause
        return UsageError(f"reward `{self.name}` failed {where}: {said}")


def score_rewards(
    name: str, ids: Sequence[str], completions: Sequence[str], answers: Sequence[str], deadline_s: float = 30.0
) -> list[float]:
    """Rewards of some rollouts by a process started for them; see `RewardProcess`."""
    with RewardProcess(name, deadline_s) as process:
        return process.score(ids, completions, answers)


def serve(function: str, descriptor: str) -> None:
    """The process: load the function, say so, answer each line; an exception ends it and stands in the log."""
    reward: Reward = resolve(function)
    with socket.socket(fileno=int(descriptor)) as own, own.makefile("rwb") as lines:
        lines.write(function.encode() + b"\n")
        lines.flush()
        for line in lines:
            completion, answer = msgspec.json.decode(line, type=tuple[str, str])
            value = reward(completion, answer)
            number = _finite(value)
            seal = 0 if number is None else seal_of_reward(completion, answer, number)
            lines.write(msgspec.json.encode((number, repr(value)[:60], seal)) + b"\n")
            lines.flush()


def _finite(value: object) -> float | None:
    """The finite number that a reward gave, of whatever type that counts as one; None for anything else."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
