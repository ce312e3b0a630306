"""Verdicts on the traces of a run's steps: asked for as steps end, awaited before more is built on them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from verifier.core.finding import ExitCode
from verifier.core.outputs import write_whole
from verifier.errors import InternalError, ViolationFound
from verifier.trainer.metrics import Metrics

DEADLINE_S = 600.0
"""Seconds that the judge of one trace may take."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on the trace of one step."""

    exit_code: int
    text: str
    suspected: Mapping[str, str] = field(default_factory=dict)
    """Code -> sentence of each check that is suspected, where nothing else stands against the step."""
    computed: frozenset[str] = frozenset()
    """Codes of the checks that compared something with a computed bound."""
    mismatched: frozenset[str] = frozenset()
    """Codes of the checks that found a mismatch of any size."""
    not_judged: tuple[str, ...] = ()
    """Sentences on what no check judged, and why."""


class Judge(Protocol):
    """Judges traces of steps in a process of its own."""

    def submit(self, trace: Path) -> Future[Judged]:
        """Begin to judge a trace."""

    def pack(self, trace: Path, *, records: bool = True) -> None:
        """Begin to pack the trace of a step that held, with its batches and with its records or without."""


def awaited(verdict: Future[Judged], what: str) -> Judged:
    """Verdict on a trace; `what` names it in an error.

    Raises:
        InternalError: none came within `DEADLINE_S`.
    """
    try:
        return verdict.result(DEADLINE_S)
    except TimeoutError as problem:
        raise InternalError(f"the judge of {what} did not answer in {DEADLINE_S:g} s") from problem


def require_held(judge: Judge, trace: Path, what: str) -> None:
    """Have a trace judged; raise a ViolationFound if a check does not hold."""
    judged = awaited(judge.submit(trace), what)
    if judged.exit_code:
        raise ViolationFound(judged.text, judged.exit_code)


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """A check that was beyond its bound by less than `SUSPECTED` times in a step."""

    step: int
    sentence: str
    """Check, excess and place."""
    trace: str
    """Trace directory of the step, which is kept."""


class _Kept(msgspec.Struct, kw_only=True):
    open: dict[str, Suspicion] = {}
    dropped: dict[str, list[int]] = {}


class Suspicions:
    """Open and dropped suspicions of a run, in a file that a resumed run goes on from.

    Those of steps after `last`, the last one that the run has kept, are forgotten.
    """

    def __init__(self, file: Path, last: int) -> None:
        self._file = file
        self._kept = msgspec.json.decode(file.read_bytes(), type=_Kept) if file.exists() else _Kept()
        self._kept.open = {code: item for code, item in self.open.items() if item.step <= last}
        dropped = {code: [step for step in steps if step <= last] for code, steps in self._kept.dropped.items()}
        self._kept.dropped = {code: steps for code, steps in dropped.items() if steps}

    @property
    def open(self) -> dict[str, Suspicion]:
        """Code of a check -> its suspicion that no later step has decided."""
        return self._kept.open

    @property
    def num_dropped(self) -> int:
        """Suspicions that a later step did not confirm."""
        return sum(map(len, self._kept.dropped.values()))

    @property
    def steps(self) -> set[int]:
        """Steps that a check suspected, whatever became of it."""
        return {item.step for item in self.open.values()}.union(*self._kept.dropped.values())

    def add(self, code: str, found: Suspicion) -> None:
        """Keep a new suspicion."""
        self.open[code] = found
        self._write()

    def drop(self, code: str) -> None:
        """Count an open suspicion as dropped."""
        self._kept.dropped.setdefault(code, []).append(self.open.pop(code).step)
        self._write()

    def _write(self) -> None:
        write_whole(self._file, msgspec.json.encode(self._kept).decode() + "\n")


@dataclass(kw_only=True)
class Verdicts:
    """Verdicts on the steps of one run.

    A step that is suspected ends nothing: the next judged step in which the same check compares something decides.
    `tell` is called with a sentence on each suspicion, when it is raised and when it is dropped. Of the traces that
    hold, `held` in order, the last `keep` stay; None keeps all.
    """

    judge: Judge
    metrics: Metrics
    tell: Callable[[str], None]
    suspicions: Suspicions
    keep: int | None = None
    held: deque[Path] = field(default_factory=deque)
    num_judged: int = field(default=0, init=False)
    """Steps that were judged, none of which was violated."""
    not_judged: Counter[str] = field(default_factory=Counter, init=False)
    """Sentences on what no check judged -> number of judged steps that each is true of."""
    _pending: deque[tuple[int, Path, Future[Judged]]] = field(default_factory=deque, init=False)

    def ask(self, step: int, trace: Path) -> None:
        """Begin to judge a step."""
        self._pending.append((step, trace, self.judge.submit(trace)))

    def settle(self, until: int) -> None:
        """Wait for the verdicts of all steps up to one.

        Raises:
            ViolationFound: of the first that does not hold and is not suspected alone, or confirms a suspicion.
            InternalError: the judge did not answer.
        """
        while self._pending and self._pending[0][0] <= until:
            step, trace, verdict = self._pending.popleft()
            judged = awaited(verdict, f"step {step}")
            self.num_judged += 1
            self.not_judged.update(judged.not_judged)
            self.metrics.judged(step, judged.exit_code, judged.suspected.values())
            known = self.suspicions.open
            both = "".join(
                f"confirmed: step {known[code].step} was suspected ({known[code].sentence}; trace in "
                f"`{known[code].trace}`), and step {step} is beyond the bound again (trace in `{trace}`)\n"
                for code in sorted(known.keys() & judged.mismatched)
            )
            if both or (judged.exit_code and not judged.suspected):
                raise ViolationFound(judged.text + both, ExitCode.VIOLATED if both else judged.exit_code)
            for code in sorted(known.keys() & judged.computed):
                self.tell(f"suspicion dropped: {code} of step {known[code].step} is within its bound in step {step}")
                self.suspicions.drop(code)
            for code, sentence in judged.suspected.items():
                self.tell(f"suspected: step {step}, {sentence}; judged again on the next step that {code} judges")
                self.suspicions.add(code, Suspicion(step=step, sentence=sentence, trace=str(trace)))
            if not judged.suspected:
                self.held.append(trace)
                self.judge.pack(trace)
            while self.keep is not None and len(self.held) > self.keep:
                self.judge.pack(self.held.popleft(), records=False)
