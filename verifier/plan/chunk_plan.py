"""Chunk plan of a weight transfer: the only source of tensor order, names, dtypes and byte offsets."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verifier.errors import ContractError

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
ALIGNMENT_BYTES = 16
"""Alignment of every tensor in its chunk's buffer, in bytes; it lets a tensor be viewed in place in any dtype."""
END_BYTES = 256 << 20
"""Greatest size of a plan's first and last chunk, in bytes. While they travel, nothing else is packed or loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Name, dtype and shape of one transferred tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the contents, in bytes; raises ContractError for a dtype that cannot be transferred."""
        if self.dtype not in DTYPE_BYTES:
            raise ContractError(f"`{self.name}` has dtype {self.dtype}, which no chunk can carry")
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEntry:
    """Place of one tensor in a chunk: bytes ``[begin, begin + tensor.num_bytes)`` of the buffer."""

    tensor: TensorMeta
    begin: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive tensors that travel in one buffer of `num_bytes` bytes.

    The cached columns hold one value per tensor, in the order of `entries`; every transfer reads them.
    """

    index: int
    entries: tuple[ChunkEntry, ...]
    num_bytes: int

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Name of each tensor."""
        return tuple(entry.tensor.name for entry in self.entries)

    @functools.cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtype of each tensor."""
        return tuple(entry.tensor.dtype for entry in self.entries)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor."""
        return tuple(entry.tensor.shape for entry in self.entries)

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the buffer."""
        return tuple(entry.begin for entry in self.entries)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each tensor, in bytes."""
        return tuple(entry.tensor.num_bytes for entry in self.entries)

    @functools.cached_property
    def places(self) -> tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], int], ...]:
        """(name, dtype, shape, row-major strides, offset in elements of its dtype) of each tensor."""
        return tuple(
            (name, dtype, shape, _row_by_row(shape), begin // DTYPE_BYTES[dtype])
            for name, dtype, shape, begin in zip(self.names, self.dtypes, self.shapes, self.begins, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """Chunks in the order in which they travel.

    Sender and receivers compare `digest` before the first byte moves. The sender then compares the stream with the plan
    tensor by tensor, and the receiver confirms every entry.
    """

    chunks: tuple[Chunk, ...]

    @property
    def tensors(self) -> Iterator[TensorMeta]:
        """All tensors in transfer order."""
        return (entry.tensor for chunk in self.chunks for entry in chunk.entries)

    @functools.cached_property
    def digest(self) -> str:
        """blake2b of the plan's canonical JSON: order, names, dtypes, shapes and offsets."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return "blake2:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> list[list[Any]]:
        """Return [bytes of the chunk, list of [name, dtype, shape, begin]] of each chunk; inverse of `from_json`."""
        return [
            [chunk.num_bytes, [[e.tensor.name, e.tensor.dtype, list(e.tensor.shape), e.begin] for e in chunk.entries]]
            for chunk in self.chunks
        ]

    @classmethod
    def from_json(cls, record: Sequence[Sequence[Any]]) -> ChunkPlan:
        """Rebuild and validate a plan from its JSON form."""
        chunks = tuple(
            Chunk(
                index=index,
                num_bytes=num_bytes,
                entries=tuple(
                    ChunkEntry(tensor=TensorMeta(name=name, dtype=dtype, shape=tuple(shape)), begin=begin)
                    for name, dtype, shape, begin in entries
                ),
            )
            for index, (num_bytes, entries) in enumerate(record)
        )
        plan = cls(chunks=chunks)
        plan.validate()
        return plan

    def validate(self) -> None:
        """Refuse a plan whose names repeat, or whose tensors overlap, overrun or leave a hole in their chunk.

        Raises:
            ContractError: names the tensor and the byte.
        """
        seen: set[str] = set()
        for chunk in self.chunks:
            at = 0
            for entry in chunk.entries:
                name = entry.tensor.name
                if name in seen:
                    raise ContractError(f"`{name}` stands twice in the chunk plan")
                seen.add(name)
                if entry.begin != at:
                    kind = "hole" if entry.begin > at else "overlap"
                    raise ContractError(f"chunk {chunk.index}: {kind} at byte {min(at, entry.begin)}, before `{name}`")
                at = _aligned(at + entry.tensor.num_bytes)
            if at != chunk.num_bytes:
                raise ContractError(f"chunk {chunk.index} holds {chunk.num_bytes} bytes, its tensors fill {at}")


@functools.cache
def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def build_plan(tensors: Iterable[TensorMeta], *, chunk_bytes: int) -> ChunkPlan:
    """Fill chunks in the given order; a tensor is never split, and one that exceeds `chunk_bytes` gets its own chunk.

    A chunk of more than `END_BYTES` holds at most as much as all chunks before it, and at most half of the remaining
    bytes. One chunk travels while the next is packed and the previous one is loaded, so only the small first and last
    chunks are waited for.

    Args:
        tensors: tensors in export order, which is the transfer order.
        chunk_bytes: greatest buffer size, in bytes; single tensors may exceed it.

    Raises:
        ContractError: no tensors, a repeated name, or a dtype that cannot be transferred.
    """
    metas = list(tensors)
    left = sum(_aligned(meta.num_bytes) for meta in metas)
    before = 0
    chunks: list[Chunk] = []
    entries: list[ChunkEntry] = []
    at = 0

    def close() -> None:
        nonlocal entries, at, before, left
        if entries:
            chunks.append(Chunk(index=len(chunks), entries=tuple(entries), num_bytes=at))
        before, left = before + at, left - at
        entries, at = [], 0

    for meta in metas:
        if entries and at + meta.num_bytes > min(chunk_bytes, max(END_BYTES, min(before, left // 2))):
            close()
        entries.append(ChunkEntry(tensor=meta, begin=at))
        at = _aligned(at + meta.num_bytes)
    close()
    if not chunks:
        raise ContractError("nothing was exported: a chunk plan needs at least one tensor")
    plan = ChunkPlan(chunks=tuple(chunks))
    plan.validate()
    return plan
