"""Chunk plans, and tilings of one tensor over its owners."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from verifier.export.sharding import Box
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan

_DTYPES = ("float32", "bfloat16", "int64", "uint8")


@st.composite
def chunk_plans(draw: st.DrawFn, *, max_tensors: int = 8, max_dim: int = 9) -> ChunkPlan:
    """Valid plans: scalars, empty-looking odd shapes, mixed dtypes, and tensors larger than a chunk."""
    shapes = st.lists(st.integers(1, max_dim), max_size=3).map(tuple)
    drawn = draw(st.lists(st.tuples(st.sampled_from(_DTYPES), shapes), min_size=1, max_size=max_tensors))
    tensors = [
        TensorMeta(name=f"layers.{at}.weight", dtype=dtype, shape=shape) for at, (dtype, shape) in enumerate(drawn)
    ]
    return build_plan(tensors, chunk_bytes=draw(st.integers(1, 4 * max_dim**2), label="chunk bytes"))


@st.composite
def shards(draw: st.DrawFn, *, max_owners: int = 8, max_rows: int = 32) -> tuple[int, list[list[Box]]]:
    """(rows of a tensor, per owner its boxes): the boxes of all owners tile the rows, once.

    Owners may hold several boxes (as fused query, key and value rows do), uneven ones, or none.
    """
    num_rows = draw(st.integers(1, max_rows), label="rows")
    num_owners = draw(st.integers(1, max_owners), label="owners")
    cuts = draw(st.sets(st.integers(1, num_rows), max_size=max_owners), label="cuts") | {0, num_rows}
    edges = sorted(cuts)
    boxes: list[list[Box]] = [[] for _ in range(num_owners)]
    for begin, end in pairwise(edges):
        owner = draw(st.integers(0, num_owners - 1), label=f"owner of {begin}:{end}")
        boxes[owner].append(Box(source="weight", begin=begin, end=end))
    return num_rows, boxes
