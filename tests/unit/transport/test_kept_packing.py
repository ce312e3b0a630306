"""What packing keeps of a chunk between updates: never an address that has changed, nor a kind of tensor.

The kernel is played by the host, which reads and writes the memory that the kernel's table names. What GPUs do with it
is tested in `tests/h100/test_digest_kernel.py`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.reference_digest import lane_sums_numpy
from verifier.errors import ContractError
from verifier.plan import digest
from verifier.plan.chunk_plan import Chunk, TensorMeta, build_plan
from verifier.plan.digest import Digests, digest_tensors
from verifier.plan.digest_definition import finish_all
from verifier.transport import buffer
from verifier.transport.buffer import pack, unpack

SHAPES = {"gate": (4, 6), "up": (4, 6), "down": (6, 4), "norm": (3,)}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tables that the kernel was started with."""
    from verifier.plan import digest_triton

    seen: list[torch.Tensor] = []

    def played(data: torch.Tensor, table: torch.Tensor, num_pieces: int, copy: torch.Tensor) -> torch.Tensor:
        seen.append(table)
        sums = torch.empty(num_pieces, 2, dtype=torch.int64)
        copy.zero_()
        for piece, (line, target, size) in enumerate(table[: 3 * num_pieces].view(3, -1).T.tolist()):
            place = copy[16 * target : 16 * target + size]
            ctypes.memmove(place.data_ptr(), data.data_ptr() + 16 * line, size)
            sums[piece] = torch.from_numpy(np.array(lane_sums_numpy(place), dtype=np.uint64).view(np.int64))
        return sums

    monkeypatch.setattr(digest_triton, "lane_sums_of_pieces", played)
    monkeypatch.setattr(digest, "Digests", lambda sums, sizes: Digests(finish_all(sums, sizes)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(buffer, "_runs_kernel", lambda into: True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return seen


@pytest.fixture
def chunk() -> Chunk:
    metas = [TensorMeta(name=name, dtype="float32", shape=shape) for name, shape in SHAPES.items()]
    return build_plan(metas, chunk_bytes=1 << 20).chunks[0]


def holds(chunk: Chunk, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether what is packed is the tensors, and its digests theirs."""
    packed = pack(chunk, tensors, None)
    assert packed.digests() == digest_tensors(tensors[name] for name in chunk.names)
    return all(torch.equal(view, tensors[name]) for name, view in unpack(chunk, packed.buffer))


def test_a_table_is_kept_while_tensors_stay_where_they_are(chunk: Chunk, tables: list[torch.Tensor]) -> None:
    tensors = weights(1)
    assert holds(chunk, tensors)
    tensors["up"].add_(1)
    assert holds(chunk, tensors)
    assert tables[0] is tables[1]


def test_tensors_that_moved_are_read_where_they_are_now(chunk: Chunk, tables: list[torch.Tensor]) -> None:
    tensors = weights(1)
    assert holds(chunk, tensors)
    held = tensors["up"]
    tensors["up"] = held + 1
    assert holds(chunk, tensors)
    tensors["down"].set_(torch.randn(6, 4))
    assert holds(chunk, tensors)
    assert len({id(table) for table in tables}) == 3


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (torch.ones(4, 6).half(), "`up` is float16 [4, 6], the chunk plan says float32 [4, 6]"),
        (torch.ones(4, 6, dtype=torch.int32), "`up` is int32 [4, 6], the chunk plan says float32 [4, 6]"),
        (torch.ones(6, 4), "`up` is float32 [6, 4], the chunk plan says float32 [4, 6]"),
    ],
)
def test_another_kind_is_refused_after_a_good_update(
    chunk: Chunk, tables: list[torch.Tensor], other: torch.Tensor, sentence: str
) -> None:
    tensors = weights(1)
    assert holds(chunk, tensors)
    with pytest.raises(ContractError) as caught:
        pack(chunk, tensors | {"up": other}, None)
    assert str(caught.value) == sentence
    tensors["up"].data = other
    with pytest.raises(ContractError) as caught:
        pack(chunk, tensors, None)
    assert str(caught.value) == sentence
    assert len(tables) == 1
    assert holds(chunk, weights(2))


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(6, 4).t(), torch.randn(8, 6)[::2], torch.randn(1, 6).expand(4, 6),
        torch._neg_view(torch.randn(4, 6)), torch.randn(25)[1:].view(4, 6), torch.nn.Parameter(torch.randn(4, 6)),
    ],
    ids=["turned", "every other row", "one row", "negated", "unaligned", "parameter"],
)  # fmt: skip
def test_what_lies_otherwise_is_packed_row_by_row(
    chunk: Chunk, tables: list[torch.Tensor], other: torch.Tensor
) -> None:
    tensors = weights(1)
    assert holds(chunk, tensors)
    assert holds(chunk, tensors | {"up": other})
    assert holds(chunk, tensors)


def test_names_in_another_order_are_packed_by_name(chunk: Chunk, tables: list[torch.Tensor]) -> None:
    assert holds(chunk, weights(1))
    assert holds(chunk, dict(reversed(weights(2).items())))
    swapped = weights(3)
    swapped["gate"], swapped["up"] = swapped["up"], swapped["gate"]
    assert holds(chunk, swapped)
