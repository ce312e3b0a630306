"""A flight recorder in shared memory: which collective each rank is in, readable from outside while it is stuck.

Each rank owns one slot and writes only there; the owner of the job reads all slots. A slot tells which collective the
rank entered last (operation, group, tensor, its count within the group) and whether the rank waits in it, and keeps,
per process group, how many collectives the rank has entered, so that "had this rank arrived" has an exact answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import monotonic

MAX_RANKS = 128
MAX_GROUPS = 1024
_HEAD = struct.Struct("<3Q40s")
"""Collectives entered, group code, count in the group, and up to five dims as below."""
_DIMS = struct.Struct("<5q")
_STATE = struct.Struct("<d")
"""Monotonic clock: positive since when it waits, negative since when it no longer does, 0 before the first wait."""
_TEXTS = struct.Struct("<16s32s16s200s")
"""Mask of the group's ranks, operation, dtype, label."""
_STATE_AT = _HEAD.size
_TEXTS_AT = _STATE_AT + _STATE.size
_GROUPS_AT = 512
_GROUP = struct.Struct("<QQ")
"""Group code and collectives entered in it."""
SLOT_BYTES = _GROUPS_AT + MAX_GROUPS * _GROUP.size
_NO_DIM = -1
_NO_SHAPE = _DIMS.pack(-2, _NO_DIM, _NO_DIM, _NO_DIM, _NO_DIM)
_MAX_SHAPES = 4096
_READ_ATTEMPTS = 20


def memory_for(num_ranks: int, fd: int = -1) -> mmap.mmap:
    """Shared memory with a slot per rank, zeroed at first.

    Args:
        num_ranks: the job's.
        fd: descriptor of a file in memory, by which other processes map the same; -1: none, only forks share it.
    """
    if fd >= 0:
        os.ftruncate(fd, num_ranks * SLOT_BYTES)
    return mmap.mmap(fd, num_ranks * SLOT_BYTES)


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
    """One rank's slot, read at one moment."""

    rank: int
    num_entered: int
    group: GroupKey
    count: int
    """Number of collectives of the group that the rank had entered, this one included."""
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
        """Tensor that it carries, as far as known: "`name` [2, 3] float32"."""
        parts = [f"`{self.label}`"] if self.label else []
        if self.shape is not None:
            parts.append(str(list(self.shape)))
        if self.dtype:
            parts.append(self.dtype)
        return " ".join(parts)


type Record = tuple[int, GroupKey, int, bytes, bytes, bytes, bytes]
"""One collective that a rank entered: its number, group, count in the group, operation, dtype, dims, label."""


class FlightRecorder:
    """Writes one rank's slot. It runs around every collective, so what did not change is not written again."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory = memory
        self._at = rank * SLOT_BYTES
        self._words = memoryview(memory).cast("Q")
        self._state = memoryview(memory).cast("d")
        self._state_index = (self._at + _STATE_AT) // 8
        self._num_entered = 0
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._dims: dict[tuple[int, ...] | None, bytes] = {None: _NO_SHAPE}
        self._texts: tuple[GroupKey | None, bytes, bytes, bytes] = (None, b"", b"", b"")
        self.label_text = b""
        self.last: Record = (0, GroupKey(code=0, mask=bytes(16)), 0, b"", b"", _NO_SHAPE, b"")

    def enter(self, group: GroupKey, op: bytes, dtype: bytes, shape: tuple[int, ...] | None) -> Record:
        """Record that the rank enters a collective; returns the record, for `wait`."""
        code = group.code
        counts = self._counts
        counts[code] = count = counts[code] + 1 if code in counts else 1
        self._num_entered += 1
        dims = self._dims.get(shape) or self._padded(shape)
        record = (self._num_entered, group, count, op, dtype, dims, self.label_text)
        self._show(record)
        place = self._places.get(code) or self._place(code)
        if place:
            self._words[place] = count
        return record

    def wait(self, record: Record) -> None:
        """Record that the rank blocks from now on, in a collective that it has entered."""
        if record is not self.last:
            self._show(record)
        self._state[self._state_index] = monotonic()

    def leave(self) -> None:
        """Record that the rank goes on."""
        self._state[self._state_index] = -monotonic()

    def _show(self, record: Record) -> None:
        number, group, count, op, dtype, dims, text = record
        memory, at, shown = self._memory, self._at, self._texts
        _HEAD.pack_into(memory, at, number, group.code, count, dims)
        texts = (group, op, dtype, text)
        if texts != shown:
            _TEXTS.pack_into(memory, at + _TEXTS_AT, group.mask, op, dtype, text)
            self._texts = texts
        self.last = record

    def _padded(self, shape: tuple[int, ...] | None) -> bytes:
        if len(self._dims) == _MAX_SHAPES:
            self._dims = {None: _NO_SHAPE}
        dims = _DIMS.pack(*(*(shape or ()), _NO_DIM, _NO_DIM, _NO_DIM, _NO_DIM, _NO_DIM)[:5])
        self._dims[shape] = dims
        return dims

    def _place(self, code: int) -> int:
        """Index of the word that counts a group's collectives; 0 when the table is full."""
        if len(self._places) == MAX_GROUPS:
            return 0
        place = (self._at + _GROUPS_AT + len(self._places) * _GROUP.size) // 8 + 1
        self._words[place - 1] = code
        self._places[code] = place
        return place


def waiting_since(memory: mmap.mmap, rank: int) -> float | None:
    """Monotonic clock at which the rank began to wait; None if it does not wait. Cheap enough to poll."""
    (state,) = _STATE.unpack_from(memory, rank * SLOT_BYTES + _STATE_AT)
    return state if state > 0 else None


def read_slot(memory: mmap.mmap, rank: int) -> Slot | None:
    """Read a rank's slot; None before its first collective.

    The writer takes no lock, so the slot is read until two readings agree.
    """
    at = rank * SLOT_BYTES
    raw = memory[at : at + SLOT_BYTES]
    for _ in range(_READ_ATTEMPTS):
        again = memory[at : at + SLOT_BYTES]
        if again == raw:
            break
        raw = again
    num_entered, code, count, dims = _HEAD.unpack_from(raw, 0)
    if num_entered == 0:
        return None
    (state,) = _STATE.unpack_from(raw, _STATE_AT)
    mask, op, dtype, text = _TEXTS.unpack_from(raw, _TEXTS_AT)
    counts = dict(_GROUP.iter_unpack(raw[_GROUPS_AT:]))
    counts.pop(0, None)
    return Slot(
        rank=rank,
        num_entered=num_entered,
        group=GroupKey(code=code, mask=mask),
        count=count,
        op=_text(op),
        dtype=_text(dtype),
        shape=None if dims == _NO_SHAPE else tuple(dim for dim in _DIMS.unpack(dims) if dim != _NO_DIM),
        label=_text(text),
        waiting=state > 0,
        since_s=abs(state),
        counts=counts,
    )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


class _Active:
    """The one recorder of this process; a rank is a process, and torch's collectives are process-wide."""

    recorder: FlightRecorder | None = None


def activate(recorder: FlightRecorder) -> None:
    """Make `recorder` this process's own; called once in a forked rank."""
    _Active.recorder = recorder


def active() -> FlightRecorder | None:
    """This process's recorder, or None outside of a rank."""
    return _Active.recorder


@contextlib.contextmanager
def blocked(group: GroupKey, op: bytes) -> Iterator[None]:
    """Record that this rank, if it is one, waits for a group's members in what is no collective of torch's."""
    recorder = _Active.recorder
    if recorder is None:
        yield
        return
    recorder.wait(recorder.enter(group, op, b"", None))
    try:
        yield
    finally:
        recorder.leave()


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
