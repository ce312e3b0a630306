"""Conditions of a run on which checks rest: pure functions of its manifest, each with a sentence for a run without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, get_args

from verifier.core.manifest import Manifest
from verifier.core.record import Record, kind_of

Part = Literal["step", "export", "load", "answers", "failure", "golden", "roundtrip", "bisect", "loop"]
"""Subject of a trace: a part of a training run, a run of another command, or another trainer's loop."""
_OTHERS: dict[str, Part] = {"golden": "golden", "roundtrip": "roundtrip", "bisect": "bisect", "probe": "loop"}
WORDS: dict[Part, str] = {
    "step": "a training step", "export": "an export", "load": "a load", "answers": "answers without log-probabilities",
    "failure": "a failure",
    "golden": "a golden run", "roundtrip": "a round trip", "bisect": "a bisection", "loop": "a recorded loop",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a check does not judge a run."""

    why: str
    """Clause such as "no expert layers"."""
    gap: bool = False
    """The run has what the check is about, and lacks the means to judge it: the report says so beside its verdict."""


Applies = Callable[[Manifest], Refusal | None]
"""None where a check judges a run."""
Needs = Sequence[type[Record] | UnionType]
"""Classes of records that a check needs."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition; `a & b` refuses with the first that fails, `a | b` with the last."""

    judge: Callable[[Manifest, Needs], Refusal | None]
    needs: Needs = ()

    def __call__(self, run: Manifest) -> Refusal | None:
        """Refuse a run, or None."""
        return self.judge(run, self.needs)

    def __str__(self) -> str:
        return "every run"

    def __and__(self, other: Condition) -> Condition:
        return Condition(lambda run, needs: self.judge(run, needs) or other.judge(run, needs))

    def __or__(self, other: Condition) -> Condition:
        return Condition(lambda run, needs: self.judge(run, needs) and other.judge(run, needs))

    def of(self, needs: Needs) -> Condition:
        """The condition of a check that needs these."""
        return replace(self, needs=needs)


def condition(
    why: str | Callable[[Manifest], str], test: Callable[[Manifest], object], *, gap: bool = False
) -> Condition:
    """Condition that holds where `test` does; `why` is the clause for a run where it does not; see `Refusal.gap`."""

    def judge(run: Manifest, _: Needs) -> Refusal | None:
        return None if test(run) else Refusal(why=why if isinstance(why, str) else why(run), gap=gap)

    return Condition(judge)


ALWAYS = condition("", lambda run: True)


def _either(one: Condition | None, other: Condition | None) -> Condition:
    return one | other if one and other else (one or other or ALWAYS)


def part_of(run: Manifest) -> Part:
    """Subject of the trace of a manifest."""
    return _OTHERS.get(run.command, run.facts.part)


@dataclass(frozen=True, slots=True)
class Parts:
    """Condition by what a trace is of; see `on`."""

    conditions: Mapping[str, Condition]

    def __call__(self, run: Manifest) -> Refusal | None:
        """Refuse a run, or None."""
        part = part_of(run)
        judge = self.conditions.get(part)
        return Refusal(why=f"nothing of it in {WORDS[part]}") if judge is None else judge(run)

    def __or__(self, other: Parts) -> Parts:
        names = self.conditions.keys() | other.conditions.keys()
        return Parts({part: _either(self.conditions.get(part), other.conditions.get(part)) for part in names})

    def of(self, needs: Needs) -> Parts:
        """The condition of a check that needs these."""
        return Parts({part: item.of(needs) for part, item in self.conditions.items()})

    def __str__(self) -> str:
        return ", ".join(WORDS[part] for part in get_args(Part) if part in self.conditions)


def on(**parts: Condition) -> Parts:
    """Condition by what a trace is of (`Part`); a check does not judge traces of what is not named."""
    assert set(parts) <= {*get_args(Part)}, parts
    return Parts(parts)


def recorded(*kinds: type[Record], gap: str = "") -> Condition:
    """Holds for a loop that recorded all these classes, or undertook to; `gap` is the clause where that is a gap.

    Without classes it is all that the check needs, unions apart.
    """

    def judge(run: Manifest, needs: Needs) -> Refusal | None:
        names = [kind_of(kind) for kind in kinds or needs if isinstance(kind, type)]
        if unbounded := [name for name in names if name in run.facts.unbounded]:
            return Refusal(why=run.facts.unbounded[unbounded[0]], gap=True)
        lacks = next((name for name in names if name not in run.facts.recorded), "")
        return Refusal(why=gap or f"the loop recorded no {lacks}", gap=bool(gap)) if lacks else None

    return Condition(judge)


NEEDS = recorded()
"""Holds for a loop that recorded all that the check needs."""


def told(part: str, why: str) -> Condition:
    """Holds for a loop that filled in a part of its records; see `Facts.told`."""
    return condition(why, lambda run: part in run.facts.told)


def several(kind: type[Record]) -> Condition:
    """Holds for a loop of which several processes recorded a class."""
    name = kind_of(kind)
    return condition(f"one process recorded {name}", lambda run: len(run.facts.recorded.get(name, ())) > 1)


def knob(run: Manifest, key: str) -> Any:
    """Value of a setting of the run by its dotted key; None where its config has none."""
    if key in run.config:
        return run.config[key]
    found: Any = run.config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
