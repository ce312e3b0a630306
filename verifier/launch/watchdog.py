"""Find the collective that hangs, and the ranks that did not come, in slots of the flight recorder. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verifier.launch.flight_recorder import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A collective that waits for longer than its deadline."""

    slot: Slot
    """The longest waiting rank in it."""
    arrived: tuple[int, ...]
    missing: tuple[int, ...]
    waited_s: float


def find_stall(slots: Sequence[Slot | None], now_s: float, deadline_s: float) -> Stall | None:
    """The stall at the root, if any collective has waited longer than `deadline_s`.

    Ranks wait in chains: tp peers for one rank, which waits for its pp peer, which computes. Of all overdue
    collectives, the one that misses a rank which waits in no collective is the root; among equals the oldest.

    Args:
        slots: per rank, None before its first collective.
        now_s: the recorder's clock.
        deadline_s: seconds that a rank may wait.
    """
    by_rank = {slot.rank: slot for slot in slots if slot is not None}
    overdue = [slot for slot in by_rank.values() if slot.waiting and now_s - slot.since_s > deadline_s]
    if not overdue:
        return None
    stalls = [_stall(slot, by_rank, now_s) for slot in overdue]

    def order(stall: Stall) -> tuple[bool, float]:
        idle = any(rank not in by_rank or not by_rank[rank].waiting for rank in stall.missing)
        return (not idle, stall.slot.since_s)

    return min(stalls, key=order)


def _stall(slot: Slot, by_rank: Mapping[int, Slot], now_s: float) -> Stall:
    arrived: list[int] = []
    missing: list[int] = []
    for rank in slot.group.ranks:
        entered = by_rank[rank].counts.get(slot.group.code, 0) if rank in by_rank else 0
        (arrived if entered >= slot.count else missing).append(rank)
    return Stall(slot=slot, arrived=tuple(arrived), missing=tuple(missing), waited_s=now_s - slot.since_s)


def doing(slot: Slot | None, now_s: float) -> str:
    """Occupation of a rank, in words."""
    if slot is None:
        return "in no collective yet"
    carried = f" of {slot.tensor}" if slot.tensor else ""
    gone_s = max(0.0, now_s - slot.since_s)  # it may have moved on since the look at the clock
    what = f"{slot.op}{carried} (its collective {slot.num_entered:,})"
    if slot.waiting:
        return f"waits {gone_s:.1f} s in {what}"
    since = f" since {gone_s:.1f} s" if slot.since_s else ""
    return f"in no collective{since}, the last was {what}"


def innermost_frame(stack: str) -> str:
    """The innermost frame of a faulthandler dump that is not torch's own or ours: "file.py:12 in name"."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    for file, line, name in frames:
        if "/torch/" not in file and "/verifier/launch/" not in file:
            return f"{'/'.join(Path(file).parts[-2:])}:{line} in {name}"
    return ""
