"""How a plan fills its chunks, and that the columns of a chunk are its tensors."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.errors import ContractError
from verifier.plan import chunk_plan
from verifier.plan.chunk_plan import END_BYTES, ChunkPlan, TensorMeta, build_plan

MIB = 1 << 20


def plan_of(sizes_mib: list[int], chunk_mib: int) -> ChunkPlan:
    metas = [TensorMeta(name=f"w{place}", dtype="uint8", shape=(mib, MIB)) for place, mib in enumerate(sizes_mib)]
    return build_plan(metas, chunk_bytes=chunk_mib * MIB)


def mib_of(plan: ChunkPlan) -> list[int]:
    return [chunk.num_bytes // MIB for chunk in plan.chunks]


def test_chunks_grow_from_the_first_and_shrink_to_the_last() -> None:
    assert mib_of(plan_of([64] * 128, 1024)) == [256, 256, 512, *[1024] * 6, 512, 256, 256]


@pytest.mark.parametrize(
    ("sizes", "chunk_mib", "expected"),
    [
        ([3] * 80, 1024, [240]),
        ([64] * 12, 1024, [256, 256, 256]),
        ([16] * 24, 64, [64] * 6),
        ([700, 8, 700], 1024, [700, 8, 700]),
        ([8, 700, 8], 1024, [8, 700, 8]),
    ],
    ids=["one-end", "two-ends", "small-chunks", "large-tensors", "a-large-tensor"],
)
def test_small_models_and_large_tensors(sizes: list[int], chunk_mib: int, expected: list[int]) -> None:
    assert mib_of(plan_of(sizes, chunk_mib)) == expected


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    chunk_bytes=st.integers(16, 4000),
    end_bytes=st.integers(16, 600),
)
def test_bounds_hold_for_any_plan(sizes: list[int], chunk_bytes: int, end_bytes: int) -> None:
    """Unless it is one tensor: no chunk exceeds the bound, and one above the ends' size none of its neighbourhoods."""
    metas = [TensorMeta(name=f"w{place}", dtype="uint8", shape=(size,)) for place, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_plan, "END_BYTES", end_bytes)
        plan = build_plan(metas, chunk_bytes=chunk_bytes)
    plan.validate()
    assert list(plan.tensors) == metas
    total = sum(chunk.num_bytes for chunk in plan.chunks)
    before = [0, *accumulate(chunk.num_bytes for chunk in plan.chunks)]
    for chunk, sent in zip(plan.chunks, before, strict=False):
        if len(chunk.names) > 1:
            filled = chunk.begins[-1] + chunk.sizes[-1]
            assert filled <= chunk_bytes
            assert filled <= max(end_bytes, sent)
            assert filled <= max(end_bytes, (total - sent) // 2)


def test_columns_are_the_tensors() -> None:
    shapes = {"a": ("float32", (3,)), "b": ("bfloat16", (2, 5)), "c": ("int64", ()), "d": ("bool", (0, 4))}
    metas = [TensorMeta(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in shapes.items()]
    plan = build_plan(metas, chunk_bytes=END_BYTES)
    (chunk,) = ChunkPlan.from_json(plan.to_json()).chunks
    assert (chunk.names, chunk.dtypes, chunk.shapes) == tuple(
        zip(*((meta.name, meta.dtype, meta.shape) for meta in metas), strict=True)
    )
    assert (chunk.begins, chunk.sizes) == ((0, 16, 48, 64), (12, 20, 8, 0))
    assert chunk.runs == (
        ((0,), "float32", (3,), (1,), 0), ((1,), "bfloat16", (2, 5), (5, 1), 8),
        ((2,), "int64", (), (), 6), ((3,), "bool", (0, 4), (4, 1), 64),
    )  # fmt: skip
    assert chunk == plan.chunks[0]
    assert list(chunk.tensors) == metas


def test_tensors_at_equal_distances_are_one_run() -> None:
    """Kinds of experts, though gate and up have one shape; a norm between the experts parts a run."""
    shapes = {"gate": (4, 2), "up": (4, 2), "down": (2, 4)}
    metas = [
        TensorMeta(name=f"{expert}.{kind}", dtype="float32", shape=shape)
        for expert in range(4)
        for kind, shape in shapes.items()
    ]
    (chunk,) = build_plan(metas[:9], chunk_bytes=END_BYTES).chunks
    assert chunk.runs == (
        ((0,), "float32", (4, 2), (2, 1), 0), ((1, 4, 7), "float32", (3, 4, 2), (24, 2, 1), 8),
        ((2, 5), "float32", (2, 2, 4), (24, 4, 1), 16), ((3, 6), "float32", (2, 4, 2), (24, 2, 1), 24),
        ((8,), "float32", (2, 4), (4, 1), 64),
    )  # fmt: skip
    norm = TensorMeta(name="norm", dtype="float32", shape=(1,))
    (chunk,) = build_plan([*metas[:6], norm, *metas[6:]], chunk_bytes=END_BYTES).chunks
    assert sorted(place for run in chunk.runs for place in run.places) == list(range(13))
    assert {run.places for run in chunk.runs} >= {(1, 4), (8, 11)}


def test_a_chunk_without_tensors_is_refused() -> None:
    with pytest.raises(ContractError, match="chunk 0 of the plan has no tensors"):
        ChunkPlan.from_json([[0, []]])
