"""Chunk plan of a weight transfer: the only source of tensor order, names, dtypes and byte offsets."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from verifier.errors import ContractError

if TYPE_CHECKING:
    import torch

    from verifier.plan.digest import Pieces

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
ALIGNMENT_BYTES = 16
"""Alignment of every tensor in its chunk's buffer, in bytes; it lets a tensor be viewed in place in any dtype."""
END_BYTES = 256 << 20
"""Greatest size of a plan's first and last chunk, in bytes. While they travel, nothing else is packed or loaded."""

MAX_CHUNK_BYTES = 32 << 20
"""Largest buffer of a transfer from host to host."""
MAX_GPU_CHUNK_BYTES = 1 << 30
"""Largest buffer between GPUs: what is said about a chunk takes less time than its bytes (docs/adr/0010)."""
MIN_CHUNK_BYTES = 64 << 10
CHUNKS = 8
"""A model of less than this many full buffers is sent in smaller ones, so that every transfer has several chunks."""


def chunk_bytes_of(model_bytes: int, most: int) -> int:
    """Return the greatest size of a model's chunks, in bytes; `most` for a large model."""
    return min(most, max(MIN_CHUNK_BYTES, model_bytes // CHUNKS))


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


class Run(NamedTuple):
    """Tensors of one dtype and shape at equal distances in a buffer, as one view of it; a single one is the view."""

    places: tuple[int, ...]
    """Positions in the chunk."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, as the next."""
    first: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive tensors that travel in one buffer of `num_bytes` bytes; every column has one value per tensor."""

    index: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...]
    """Byte offset of each tensor in the buffer."""
    num_bytes: int

    @functools.cached_property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """Each tensor."""
        columns = zip(self.names, self.dtypes, self.shapes, strict=True)
        return tuple(TensorMeta(name=name, dtype=dtype, shape=shape) for name, dtype, shape in columns)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each tensor, in bytes."""
        return tuple(tensor.num_bytes for tensor in self.tensors)

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """Views that are all tensors together, fewer than these are: cutting one into many costs less than a view each.

        Tensors between neighbours of the same dtypes and shapes repeat at equal distances: one kind of each expert.
        """
        kinds = [None, *zip(self.dtypes, self.shapes, strict=True), None]
        alike: dict[Any, list[list[int]]] = {}
        for place, begin in enumerate(self.begins):
            found = alike.setdefault(tuple(kinds[place : place + 3]), [[]])
            last = found[-1]
            if len(last) > 1 and begin - self.begins[last[-1]] != self.begins[last[1]] - self.begins[last[0]]:
                found.append(last := [])
            last.append(place)
        return tuple(self._run(places) for found in alike.values() for places in found)

    @functools.cached_property
    def pieces(self) -> Pieces:
        """The tensors as ranges of the buffer, with what a GPU keeps of them from one transfer to the next."""
        from verifier.plan.digest import Pieces

        return Pieces(self.begins, self.sizes)

    @functools.cached_property
    def guards(self) -> dict[Any, Any]:
        """Guards, by GPU, of the tensors that were last packed from there; see `verifier.transport.buffer.pack`."""
        return {}

    def _run(self, places: Sequence[int]) -> Run:
        """Return the view of the tensors at these places, which are alike."""
        dtype, shape = self.dtypes[places[0]], self.shapes[places[0]]
        first, *others = (self.begins[place] // DTYPE_BYTES[dtype] for place in places)
        strides = _row_by_row(shape)
        if others:
            shape, strides = (len(places), *shape), (others[0] - first, *strides)
        return Run(tuple(places), dtype, shape, strides, first)


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
        return (tensor for chunk in self.chunks for tensor in chunk.tensors)

    @functools.cached_property
    def digest(self) -> str:
        """blake2b of the plan's canonical JSON: order, names, dtypes, shapes and offsets."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return "blake2:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> list[tuple[int, list[tuple[Any, ...]]]]:
        """Return (bytes of the chunk, list of (name, dtype, shape, begin)) of each chunk; inverse of `from_json`."""
        return [
            (chunk.num_bytes, list(zip(chunk.names, chunk.dtypes, chunk.shapes, chunk.begins, strict=True)))
            for chunk in self.chunks
        ]

    @classmethod
    def from_json(cls, record: Sequence[Sequence[Any]]) -> ChunkPlan:
        """Rebuild and validate a plan from its JSON form; raises a ContractError as `validate` does."""
        chunks = []
        for index, (num_bytes, tensors) in enumerate(record):
            if not tensors:
                raise ContractError(f"chunk {index} of the plan has no tensors")
            names, dtypes, shapes, begins = zip(*tensors, strict=True)
            columns = {"names": names, "dtypes": dtypes, "shapes": tuple(map(tuple, shapes)), "begins": begins}
            chunks.append(Chunk(index=index, num_bytes=num_bytes, **columns))
        plan = cls(chunks=tuple(chunks))
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
            for name, begin, size in zip(chunk.names, chunk.begins, chunk.sizes, strict=True):
                if name in seen:
                    raise ContractError(f"`{name}` stands twice in the chunk plan")
                seen.add(name)
                if begin != at:
                    kind = "hole" if begin > at else "overlap"
                    raise ContractError(f"chunk {chunk.index}: {kind} at byte {min(at, begin)}, before `{name}`")
                at += _aligned(size)
            if at != chunk.num_bytes:
                raise ContractError(f"chunk {chunk.index} holds {chunk.num_bytes} bytes, its tensors fill {at}")


@functools.cache
def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
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
    before = at = 0
    chunks: list[list[TensorMeta]] = [[]]
    for meta in metas:
        if chunks[-1] and at + meta.num_bytes > min(chunk_bytes, max(END_BYTES, min(before, left // 2))):
            chunks.append([])
            before, left, at = before + at, left - at, 0
        chunks[-1].append(meta)
        at += _aligned(meta.num_bytes)
    if not metas:
        raise ContractError("nothing was exported: a chunk plan needs at least one tensor")
    plan = ChunkPlan(chunks=tuple(_chunk(index, tensors) for index, tensors in enumerate(chunks)))
    plan.validate()
    return plan


def plan_of(stream: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int) -> ChunkPlan:
    """The chunk plan of an export stream, which is consumed; contents are not kept."""
    from verifier.plan.digest import dtype_name

    return build_plan(
        (TensorMeta(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape)) for name, tensor in stream),
        chunk_bytes=chunk_bytes,
    )


def _chunk(index: int, tensors: Sequence[TensorMeta]) -> Chunk:
    *begins, num_bytes = accumulate((_aligned(tensor.num_bytes) for tensor in tensors), initial=0)
    return Chunk(
        index=index,
        names=tuple(tensor.name for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        shapes=tuple(tensor.shape for tensor in tensors),
        begins=tuple(begins),
        num_bytes=num_bytes,
    )
