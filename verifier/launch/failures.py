"""Failures of a run of ranks, their sentences, and errors on their way from one process to another."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from verifier.errors import ContractError, InternalError, UsageError, VerifierError
from verifier.launch.stack_failure import StackFailed, failure_of, named
from verifier.stages.load.records import StackFailure

JSON = Any
OURS = (UsageError, ContractError, InternalError)
"""Errors that cross a process's border as themselves."""
_MAX_RANKS_SHOWN = 8
_MAX_LINES_SHOWN = 30


class LaunchError(VerifierError):
    """A run of ranks ended without a result; all its processes are gone when this is raised."""


class RankFailed(LaunchError):
    """A rank raised, exited or was killed.

    Attributes:
        rank: the rank that failed first.
        place: its coordinates, or "" where no mesh is known.
        cause: "ValueError: ...", "exit status 7" or "killed by SIGKILL".
        traceback: the rank's traceback text, or "" if it left none.
        log_tail: the last lines of what it printed.
    """

    def __init__(self, *, rank: int, place: str, cause: str, traceback: str, log_tail: str) -> None:
        self.rank, self.place, self.cause, self.traceback, self.log_tail = rank, place, cause, traceback, log_tail
        parts = [f"rank {rank}{_in_brackets(place)} failed: {cause}"]
        if traceback:
            parts.append(_last_lines(traceback))
        if log_tail:
            parts.append(f"last lines of rank {rank}'s log:\n{_last_lines(log_tail)}")
        super().__init__("\n".join(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Occupation of one rank when a run was stopped."""

    rank: int
    place: str
    doing: str
    """"waits 12.3 s in all_reduce of `x`", "left broadcast of `y` 3.0 s ago", "in no collective yet"."""
    frame: str = ""
    """Innermost Python frame, "file.py:12 in name", if it could be read."""

    def __str__(self) -> str:
        at = f", at {self.frame}" if self.frame else ""
        return f"rank {self.rank}{_in_brackets(self.place)}: {self.doing}{at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A collective that waited longer than its deadline."""

    op: str
    """"all_reduce", for instance."""
    tensor: str
    """The tensor that it carried: label, shape and dtype, as far as known."""
    group: tuple[int, ...]
    """Global ranks of its process group."""
    arrived: tuple[int, ...]
    """Ranks of the group that had entered this very collective."""
    missing: tuple[int, ...]
    waited_s: float
    """Seconds that the longest waiting rank had waited."""
    stopped: tuple[int, ...] = ()
    """Ranks of the group that a signal has stopped, arrived or not."""

    def __str__(self) -> str:
        of_tensor = f" of {self.tensor}" if self.tensor else ""
        what = "every rank arrived, yet it did not complete"
        if self.missing:
            what = f"{_ranks(self.arrived)} arrived, {_ranks(self.missing)} did not"
        if self.stopped:
            what = f"rank {_ranks(self.stopped)} is stopped by a signal ({what})"
        where = f"in a group of {len(self.group)} ranks {_ranks(self.group)}"
        return f"{self.op}{of_tensor} waited {self.waited_s:.1f} s {where}: {what}"


class CollectiveTimeout(LaunchError):
    """A collective waited longer than its deadline.

    Attributes:
        stall: the collective.
        missing: ranks that did not arrive or are stopped, each with where it is instead.
    """

    def __init__(self, stall: Stall, missing: Sequence[RankState]) -> None:
        self.stall, self.missing = stall, missing
        super().__init__("\n".join([str(stall), *_states(missing)]))


class JobTimeout(LaunchError):
    """A whole job passed its deadline while no single collective had passed its own."""

    def __init__(self, *, function: str, deadline_s: float, states: Sequence[RankState]) -> None:
        self.function, self.deadline_s, self.states = function, deadline_s, tuple(states)
        lines = [f"`{function}` did not end within its deadline of {deadline_s:g} s", *_states(states)]
        super().__init__("\n".join(lines))


def to_record(error: BaseException) -> dict[str, JSON]:
    """An error as a JSON value that can leave its process."""
    message, kind, stack = str(error), type(error), failure_of(error)
    return {
        "kinds": [item.__name__ for item in kind.__mro__],
        "message": message,
        "cause": f"{kind.__name__}: {message}".rstrip(": "),
        "traceback": "".join(traceback.format_exception(error)),
        **({} if stack is None else {"stack": msgspec.to_builtins(stack)}),
    }


def known_error(
    record: Mapping[str, JSON], kinds: Sequence[type[VerifierError]] = OURS, *, party: str = "", place: str = ""
) -> VerifierError | None:
    """The error of a record as itself, if it is of one of these kinds; of the nearest, where it is of several.

    A failure of the stack under test is one too: of this party, and at this place, unless it says of which.
    """
    if "stack" in record:
        return StackFailed(named(msgspec.convert(record["stack"], StackFailure), party, place))
    by_name = {kind.__name__: kind for kind in kinds}
    return next((by_name[name](record["message"]) for name in record["kinds"] if name in by_name), None)


def error_from(record: Mapping[str, JSON], what: str, party: str = "") -> VerifierError:
    """The error of a record as itself, or an InternalError with its cause.

    Args:
        record: see `to_record`.
        what: begins the sentence about an error that is not one of ours.
        party: see `known_error`.
    """
    known = known_error(record, party=party)
    return known or InternalError(f"{what}: {record['cause']}\n{record['traceback']}".rstrip())


def _in_brackets(place: str) -> str:
    return f" ({place})" if place else ""


def _states(states: Sequence[RankState]) -> list[str]:
    shown = [f"  {state}" for state in states[:_MAX_RANKS_SHOWN]]
    rest = len(states) - len(shown)
    return [*shown, f"  and {rest} more ranks"] if rest else shown


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as text with runs folded: "[0-3, 7]"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return "[" + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


def _last_lines(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines()[-_MAX_LINES_SHOWN:])
