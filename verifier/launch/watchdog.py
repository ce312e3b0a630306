"""Find the collective that hangs, and the ranks that did not come, in slots of the flight recorder. Pure functions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from verifier.errors import VerifierError
from verifier.launch.child import Child
from verifier.launch.failures import Stall
from verifier.launch.flight_recorder import Slot


def find_stall(
    slots: Sequence[Slot | None], now_s: float, deadline_s: float, stopped: Collection[int] = ()
) -> Stall | None:
    """The stall at the root, if any collective has waited longer than `deadline_s`.

    Ranks wait in chains: tp peers for one rank, which waits for its pp peer, which computes. Of all overdue collectives
    and those that the ranks which they miss wait in, the one that misses a rank which waits in none is the root; of
    several the one that misses the fewest which wait elsewhere, then the oldest. A rank that a signal has stopped waits
    for nothing, even where it has arrived. Slots are per rank, None before its first collective; `now_s` is by the
    recorder's clock.
    """
    waiting = {rank for rank, slot in enumerate(slots) if slot is not None and slot.since_s > 0}

    @functools.cache
    def entered(rank: int) -> dict[int, int]:
        slot = slots[rank]
        return {} if slot is None else slot.entered

    def stall_of(overdue: Slot) -> Stall:
        group = overdue.ranks
        arrived = {rank for rank in group if entered(rank).get(overdue.code, 0) >= overdue.count}
        return Stall(
            op=overdue.op, tensor=overdue.tensor, group=group, arrived=tuple(filter(arrived.__contains__, group)),
            missing=tuple(rank for rank in group if rank not in arrived), waited_s=now_s - overdue.since_s,
            stopped=tuple(rank for rank in group if rank in stopped),
        )  # fmt: skip

    involved = {rank for rank in waiting if (slot := slots[rank]) and slot.since_s < now_s - deadline_s}
    seen: set[int] = set()
    stalls: dict[tuple[int, int], Stall] = {}
    # By group and count of the collective: all that wait in one miss the same ranks, the oldest for the longest.
    while reached := involved - seen:
        seen |= reached
        for slot in sorted(filter(None, map(slots.__getitem__, reached)), key=lambda slot: slot.since_s):
            if (key := (slot.code, slot.count)) not in stalls:
                stalls[key] = stall_of(slot)
                involved |= waiting.intersection(stalls[key].missing)

    def order(stall: Stall) -> tuple[bool, int, float]:
        elsewhere = waiting.intersection(stall.missing)
        return not stall.stopped and len(elsewhere) == len(stall.missing), len(elsewhere), -stall.waited_s

    return min(stalls.values(), default=None, key=order)


def doing(slot: Slot | None, now_s: float) -> str:
    """Occupation of a rank, in words."""
    if slot is None:
        return "in no collective yet"
    carried = f" of {slot.tensor}" if slot.tensor else ""
    gone_s = max(0.0, now_s - abs(slot.since_s))  # it may have moved on since the look at the clock
    what = f"{slot.op}{carried} (its collective {slot.num_entered:,})"
    if slot.since_s > 0:
        return f"waits {gone_s:.1f} s in {what}"
    since = f" since {gone_s:.1f} s" if slot.since_s else ""
    return f"in no collective{since}, the last was {what}"


def is_whole(stack: str) -> bool:
    """Tell whether a faulthandler dump has its last line: the outermost frame, or what stands for frames above 100."""
    return stack.endswith((" in <module>\n", "\n  ...\n"))


def innermost_frame(stack: str) -> str:
    """The innermost frame of a faulthandler dump that is not torch's own or ours: "file.py:12 in name"."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    for file, line, name in frames:
        if "/torch/" not in file and "/verifier/launch/" not in file:
            return f"{'/'.join(Path(file).parts[-2:])}:{line} in {name}"
    return ""


class Vigil:
    """Processes that have to live for as long as their owner needs them. Threads may wait while none keeps or drops."""

    def __init__(self) -> None:
        self._deaths: dict[Child, Callable[[], VerifierError]] = {}

    def keep(self, child: Child, death: Callable[[], VerifierError]) -> None:
        """Watch a process, until it is dropped, which is before it is stopped. Of several dead ones the first is named.

        `death` makes the error that names it, once it has ended; it must not wait by this vigil.
        """
        self._deaths[child] = death

    def drop(self, child: Child) -> None:
        """Watch a process no more."""
        self._deaths.pop(child, None)

    def wait(self, wanted: Collection[Any], timeout_s: float | None) -> list[Any]:
        """Wait for one of these objects, which have a `fileno`, as `multiprocessing.connection.wait` does.

        What is ready comes before a death, so that what a process said last is read.

        Raises:
            VerifierError: nothing is ready, and a process that is watched has ended.
        """
        watched: list[Any] = [*wanted, *self._deaths]
        found: list[Any] = connection.wait(watched, timeout_s)
        if ready := [item for item in found if item not in self._deaths]:
            return ready
        for child, death in self._deaths.items():
            if child in found:
                raise death()
        return []

    def look(self, within_s: float = 0.0) -> None:
        """Raise the error of a process that has ended, or ends within so many seconds."""
        self.wait((), within_s)
