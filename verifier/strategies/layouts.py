"""Meshes of up to 64 ranks, models that fit their stages, chunk plans, and tilings of one tensor over its owners."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from verifier.export.sharding import Box
from verifier.mesh import Mesh
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 64, max_vpp: int = 3) -> Mesh:
    """Any mesh that `Mesh` accepts, with even stages; shrinks to one rank, then to the first of tp, cp, pp, dp."""
    room = max_ranks
    sizes = {}
    for axis in ("tp", "cp", "pp", "dp"):
        sizes[axis] = draw(st.integers(1, room), label=axis)
        room //= sizes[axis]
    experts_over = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = draw(st.sampled_from(_divisors(experts_over)), label="ep")
    etp = draw(st.sampled_from(_divisors(experts_over // ep)), label="etp")
    vpp = draw(st.integers(1, max_vpp), label="vpp") if sizes["pp"] > 1 else 1
    return Mesh(ep=ep, etp=etp, vpp=vpp, **sizes)


@st.composite
def stages(draw: st.DrawFn, *, max_pp: int = 8, max_layers: int = 24) -> tuple[Mesh, int]:
    """A mesh with pipeline stages, even, virtual or uneven at either end, and a number of layers that fits it."""
    pp = draw(st.integers(1, max_pp), label="pp")
    kind = draw(st.sampled_from(["even", "virtual", "uneven"]), label="kind") if pp > 1 else "even"
    per_chunk = draw(st.integers(1, max(1, max_layers // (pp * 2))), label="layers per chunk")
    if kind == "even":
        return Mesh(pp=pp), pp * per_chunk
    if kind == "virtual":
        vpp = draw(st.integers(2, 3), label="vpp")
        return Mesh(pp=pp, vpp=vpp), pp * vpp * per_chunk
    first = draw(st.integers(1, per_chunk + 2), label="first")
    last = draw(st.integers(1, per_chunk + 2), label="last")
    return Mesh(pp=pp, first_stage_layers=first, last_stage_layers=last), first + last + (pp - 2) * per_chunk


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def chunk_plans(draw: st.DrawFn, *, max_tensors: int = 8, max_dim: int = 9) -> ChunkPlan:
    """Valid plans: scalars, empty-looking odd shapes, mixed dtypes, and tensors larger than a chunk."""
    shapes = st.lists(st.integers(1, max_dim), max_size=3).map(tuple)
    dtypes = st.sampled_from(["float32", "bfloat16", "int64", "uint8"])
    drawn = draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=max_tensors))
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
