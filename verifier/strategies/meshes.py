"""Meshes of up to 64 ranks, and models that fit their pipeline stages."""

from __future__ import annotations

from hypothesis import strategies as st

from verifier.mesh.mesh import Mesh


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 64, max_vpp: int = 3) -> Mesh:
    """Any mesh that `Mesh` accepts, with even stages; shrinks to one rank, then to the earlier axes of tp, cp, pp, dp.

    Args:
        draw: given by Hypothesis.
        max_ranks: greatest world size.
        max_vpp: most virtual stages per pipeline stage.
    """
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
