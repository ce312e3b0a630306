"""A flight recorder in shared memory: which collective each rank is in, readable from outside while it is stuck.

Each rank owns one slot and writes only there; the owner of the job reads all slots. A slot also keeps, per process
group, how many collectives the rank has entered, so that "had this rank arrived" has an exact answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

MAX_GROUPS = 1024
_MAX_DIMS = 5
_READ_ATTEMPTS = 20


class GroupKey(NamedTuple):
    """One process group as all its members name it."""

    code: int
    """64-bit name, equal on every member, never 0."""
    mask: bytes
    """Bit r set for global rank r, the lowest byte first."""


def group_key(name: str, ranks: Iterable[int]) -> GroupKey:
    """The key of the group `name` over these global ranks."""
    bits = sum(1 << rank for rank in ranks)
    mask = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    code = hashlib.blake2b(name.encode() + b"\0" + mask, digest_size=8).digest()
    return GroupKey(int.from_bytes(code, "little") or 1, mask)


class Slot(ctypes.Structure):
    """One rank's slot: the collective that it entered last or waits in; see `slot_of`."""

    @property
    def op(self) -> str:
        """Operation, for instance "all_reduce"."""
        return self.op_text.decode()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, ascending."""
        bits = f"{int.from_bytes(self.mask, 'little'):b}"
        return tuple(rank for rank, bit in enumerate(reversed(bits)) if bit == "1")

    @property
    def tensor(self) -> str:
        """Tensor that it carries, as far as known: "`name` [2, 3] float32"."""
        label = self.label_text.decode(errors="replace")
        shape = str(self.dims[: self.num_dims]) if self.num_dims >= 0 else ""
        return " ".join(filter(None, [label and f"`{label}`", shape, self.dtype_text.decode()]))

    @property
    def entered(self) -> dict[int, int]:
        """Number of collectives that the rank has entered, by the code of their group."""
        groups = self.groups[:]
        return dict(zip(groups[::2], groups[1::2], strict=True))


@functools.cache
def slot_of(num_ranks: int) -> type[Slot]:
    """The slot of a rank of a job of so many: its mask has a bit for each."""
    fields = [
        ("num_entered", ctypes.c_uint64),  # of all groups, this one included; 0 before the first
        ("code", ctypes.c_uint64),  # of the group
        ("count", ctypes.c_uint64),  # collectives of the group that the rank had entered, this one included
        ("num_dims", ctypes.c_int64),  # of the tensor that it carries; -1: none is known
        ("dims", ctypes.c_int64 * _MAX_DIMS),
        ("since_s", ctypes.c_double),  # monotonic clock: since when it waits; negative: when it left; 0: neither yet
        ("op_text", ctypes.c_char * 32),
        ("dtype_text", ctypes.c_char * 16),
        ("label_text", ctypes.c_char * 200),
        ("mask", ctypes.c_uint8 * -(-num_ranks // 8)),  # of the group
        ("groups", ctypes.c_uint64 * (2 * MAX_GROUPS)),  # of each group its code, and collectives entered
    ]
    return type("SlotOfJob", (Slot,), {"_fields_": fields})


def slots_for(num_ranks: int, fd: int = -1) -> ctypes.Array[Slot]:
    """A slot per rank, zeroed at first, in a file in memory that others map by its descriptor; -1: for forks alone."""
    kind = slot_of(num_ranks) * num_ranks
    if fd >= 0:
        os.ftruncate(fd, ctypes.sizeof(kind))
    return kind.from_buffer(mmap.mmap(fd, ctypes.sizeof(kind)))


def read_slot(slot: Slot) -> Slot | None:
    """A copy of a rank's slot; None before its first collective.

    The writer takes no lock, so the slot is read until two readings agree.
    """
    raw = bytes(slot)
    for _ in range(_READ_ATTEMPTS):
        before, raw = raw, bytes(slot)
        if raw == before:
            break
    copy = type(slot).from_buffer_copy(raw)
    return copy if copy.num_entered else None


def packed(slot: Slot | None) -> bytes:
    """A copy of a slot without the groups that its rank is not in; nothing for None."""
    return b"" if slot is None else bytes(slot).rstrip(b"\0")


def unpacked(raw: bytes, num_ranks: int, ahead_s: float) -> Slot | None:
    """The slot of a rank of a job that was packed, its time moved by the seconds that this process's clock is ahead."""
    if not raw:
        return None
    kind = slot_of(num_ranks)
    slot = kind.from_buffer_copy(raw.ljust(ctypes.sizeof(kind), b"\0"))
    if slot.since_s:
        slot.since_s += ahead_s if slot.since_s > 0 else -ahead_s
    return slot


class Entry(NamedTuple):
    """One collective that a rank entered; see `Slot`."""

    num_entered: int
    group: GroupKey
    nth: int
    """Count of the group's collectives, this one included."""
    op: str
    dtype: str
    shape: Sequence[int] | None
    label: str


class FlightRecorder:
    """Writes one rank's slot."""

    def __init__(self, slot: Slot) -> None:
        self.label = ""
        self.use(slot)

    def use(self, slot: Slot) -> None:
        """Write to this slot from now on; nothing that was entered before is carried over."""
        self.slot, self._groups = slot, slot.groups
        self.last = Entry(0, GroupKey(0, b""), 0, "", "", None, "")
        self._num_entered = 0
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def enter(self, group: GroupKey, op: str, dtype: str = "", shape: Sequence[int] | None = None) -> Entry:
        """Record that the rank enters a collective; the record is for `wait`."""
        code = group.code
        self._num_entered += 1
        count = self._counts[code] = self._counts.get(code, 0) + 1
        record = Entry(self._num_entered, group, count, op, dtype, shape, self.label)
        self._show(record)
        place = self._places.get(code)
        if place is None:
            place = self._places[code] = 2 * len(self._places)
            if place < 2 * MAX_GROUPS:
                self._groups[place] = code
        if place < 2 * MAX_GROUPS:
            self._groups[place + 1] = count
        return record

    def wait(self, record: Entry) -> None:
        """Record that the rank blocks from now on, in a collective that it has entered."""
        if record is not self.last:
            self._show(record)
        self.slot.since_s = monotonic()

    def leave(self) -> None:
        """Record that the rank goes on."""
        self.slot.since_s = -monotonic()

    def _show(self, record: Entry) -> None:
        slot, last, shape = self.slot, self.last, record.shape
        slot.num_entered, slot.count = record.num_entered, record.nth
        self.last = record
        if record[3:] == last[3:] and record.group is last.group:
            return  # it runs around every collective: what did not change is not written again
        slot.code = record.group.code
        size = len(slot.mask)
        ctypes.memmove(slot.mask, record.group.mask.ljust(size, b"\0"), size)
        slot.num_dims = -1 if shape is None else min(len(shape), _MAX_DIMS)
        if shape:
            slot.dims[: slot.num_dims] = shape[:_MAX_DIMS]
        slot.op_text, slot.dtype_text = record.op.encode()[:32], record.dtype.encode()[:16]
        slot.label_text = record.label.encode()[:200]


RECORDER = FlightRecorder(slot_of(1)())
"""This process's own; torch's collectives are process-wide. A rank gives it a slot that the owner of the job reads."""


@contextlib.contextmanager
def blocked(record: Entry) -> Iterator[None]:
    """Record that this rank waits for the members of a group that it has entered."""
    RECORDER.wait(record)
    try:
        yield
    finally:
        RECORDER.leave()


@contextlib.contextmanager
def label(text: str) -> Iterator[None]:
    """Name the tensor that the collectives inside carry, for the message if one of them hangs. Costs nothing else."""
    before, RECORDER.label = RECORDER.label, text
    try:
        yield
    finally:
        RECORDER.label = before
