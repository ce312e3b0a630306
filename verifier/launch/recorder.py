"""A flight recorder in shared memory: which collective each rank is in, readable from outside while it is stuck.

Each rank owns one slot and writes only there; the forking process reads all slots. A slot tells which collective the
rank entered last (operation, group, tensor, its count within the group) and whether the rank waits in it, and keeps,
per process group, how many collectives the rank has entered, so that "had this rank arrived" has an exact answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_RANKS = 128
MAX_GROUPS = 1024
_ENTERED = struct.Struct("<QQ16sQ24s16s5q200s")
_STATE = struct.Struct("<dQ")
_GROUP = struct.Struct("<QQ")
_STATE_AT = _ENTERED.size
_GROUPS_AT = 512
SLOT_BYTES = _GROUPS_AT + MAX_GROUPS * _GROUP.size
_OUTSIDE, _WAITING = 0, 1
_NO_DIM = -1
_NO_SHAPE = (-2, _NO_DIM, _NO_DIM, _NO_DIM, _NO_DIM)
_READ_ATTEMPTS = 20


def memory_for(num_ranks: int) -> mmap.mmap:
    """Anonymous shared memory with a zeroed slot per rank; processes forked after this share it."""
    return mmap.mmap(-1, num_ranks * SLOT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """One process group as all its members name it."""

    code: int
    """64-bit name, equal on every member, never 0."""
    mask: bytes
    """16 bytes, bit r set for global rank r."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        bits = int.from_bytes(self.mask, "little")
        return tuple(rank for rank in range(MAX_RANKS) if bits >> rank & 1)


def group_key(name: str, ranks: Iterable[int]) -> GroupKey:
    """The key of the group `name` over these global ranks."""
    bits = sum(1 << rank for rank in ranks)
    mask = bits.to_bytes(16, "little")
    code = int.from_bytes(hashlib.blake2b(name.encode() + mask, digest_size=8).digest(), "little")
    return GroupKey(code=code or 1, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one rank's slot said at one moment."""

    rank: int
    num_entered: int
    group: GroupKey
    count: int
    """How many collectives of the group the rank had entered, this one included."""
    op: str
    dtype: str
    shape: tuple[int, ...] | None
    label: str
    waiting: bool
    since_s: float
    """Monotonic clock: when it began to wait, or when it left."""
    counts: dict[int, int]
    """Group code to collectives entered."""

    @property
    def tensor(self) -> str:
        """What it carries, as far as known: "`name` [2, 3] float32"."""
        parts = [f"`{self.label}`"] if self.label else []
        if self.shape is not None:
            parts.append(str(list(self.shape)))
        if self.dtype:
            parts.append(self.dtype)
        return " ".join(parts)


class Recorder:
    """Writes one rank's slot."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory = memory
        self._at = rank * SLOT_BYTES
        self._num_entered = 0
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._shown = b""
        self.label_text = b""

    def enter(self, group: GroupKey, op: bytes, dtype: bytes, shape: Sequence[int] | None) -> bytes:
        """Record that the rank enters a collective; returns the record, for `wait`."""
        code = group.code
        count = self._counts.get(code, 0) + 1
        self._counts[code] = count
        self._num_entered += 1
        dims = (*shape, _NO_DIM, _NO_DIM, _NO_DIM, _NO_DIM, _NO_DIM)[:5] if shape is not None else _NO_SHAPE
        entered = _ENTERED.pack(self._num_entered, code, group.mask, count, op, dtype, *dims, self.label_text)
        self._show(entered)
        place = self._places.get(code)
        if place is None and len(self._places) < MAX_GROUPS:
            place = self._places[code] = self._at + _GROUPS_AT + len(self._places) * _GROUP.size
        if place is not None:
            _GROUP.pack_into(self._memory, place, code, count)
        return entered

    def wait(self, entered: bytes) -> None:
        """Record that the rank blocks from now on, in a collective that it has entered."""
        if entered is not self._shown:
            self._show(entered)
        _STATE.pack_into(self._memory, self._at + _STATE_AT, time.monotonic(), _WAITING)

    def leave(self) -> None:
        """Record that the rank goes on."""
        _STATE.pack_into(self._memory, self._at + _STATE_AT, time.monotonic(), _OUTSIDE)

    def _show(self, entered: bytes) -> None:
        self._memory[self._at : self._at + _STATE_AT] = entered
        self._shown = entered

    @property
    def last(self) -> bytes:
        """The record that the slot shows now."""
        return self._shown


def waiting_since(memory: mmap.mmap, rank: int) -> float | None:
    """Monotonic clock at which the rank began to wait; None if it does not wait. Cheap enough to poll."""
    since_s, state = _STATE.unpack_from(memory, rank * SLOT_BYTES + _STATE_AT)
    return since_s if state == _WAITING else None


def read_slot(memory: mmap.mmap, rank: int) -> Slot | None:
    """What a rank's slot says, or None before its first collective.

    The writer takes no lock, so the slot is read until two readings agree.
    """
    at = rank * SLOT_BYTES
    raw = memory[at : at + SLOT_BYTES]
    for _ in range(_READ_ATTEMPTS):
        again = memory[at : at + SLOT_BYTES]
        if again == raw:
            break
        raw = again
    num_entered, code, mask, count, op, dtype, *dims, label = _ENTERED.unpack_from(raw, 0)
    if num_entered == 0:
        return None
    since_s, state = _STATE.unpack_from(raw, _STATE_AT)
    counts = dict(_GROUP.iter_unpack(raw[_GROUPS_AT:]))
    counts.pop(0, None)
    return Slot(
        rank=rank,
        num_entered=num_entered,
        group=GroupKey(code=code, mask=mask),
        count=count,
        op=_text(op),
        dtype=_text(dtype),
        shape=None if tuple(dims) == _NO_SHAPE else tuple(dim for dim in dims if dim != _NO_DIM),
        label=_text(label),
        waiting=state == _WAITING,
        since_s=since_s,
        counts=counts,
    )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


class _Active:
    """The one recorder of this process; a rank is a process, and torch's collectives are process-wide."""

    recorder: Recorder | None = None


def activate(recorder: Recorder) -> None:
    """Make `recorder` this process's own; called once in a forked rank."""
    _Active.recorder = recorder


def active() -> Recorder | None:
    """This process's recorder, or None outside of a rank."""
    return _Active.recorder


@contextlib.contextmanager
def label(text: str) -> Iterator[None]:
    """Name the tensor that the collectives inside carry, for the message if one of them hangs. Costs nothing else."""
    recorder = _Active.recorder
    if recorder is None:
        yield
        return
    before = recorder.label_text
    recorder.label_text = text.encode()[:200]
    try:
        yield
    finally:
        recorder.label_text = before
