"""Derived layouts: of numbers that hand-written rows place, against those rows; and of imports that compute or err.

What this does not exercise: numbers that Megatron-Bridge places (tests/dist/test_derived_layouts.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts import config_of, differences, meshes, numbered, shapes_of, small_changes
from verifier.errors import ContractError
from verifier.export.derived import DerivedLayout, Held, derive, held_by
from verifier.export.names import ModelLayout, layout_of
from verifier.export.sharding import Box, Owners, unshard
from verifier.mesh import Mesh
from verifier.model.numbered import Numbering
from verifier.model.tiny import TINY

Contents = dict[str, torch.Tensor]
Import = Callable[[int, Contents], Contents]
"""From (rank, checkpoint of one pass) to the local tensors of a rank."""


def _numbering(shapes: Mapping[str, tuple[int, ...]], bits: int = 24) -> Numbering:
    return Numbering(shapes=dict(sorted(shapes.items())), bits=bits)


def _checkpoint(numbering: Numbering, which: str) -> Contents:
    return {name: torch.from_numpy(numbering.values(name, which)).double() for name in numbering.names}


def _derived(numbering: Numbering, mesh: Mesh, load: Import) -> DerivedLayout:
    """The layout of a model with one chunk per rank, whose import is `load`."""
    ranks = []
    passes = {which: _checkpoint(numbering, which) for which in numbering.passes}
    for rank in range(mesh.world_size):
        read = {which: load(rank, contents) for which, contents in passes.items()}
        names = list(read["zeros"])
        local = [(0, name, False, {which: read[which][name].numpy() for which in read}) for name in names]
        ranks.append(held_by(local, numbering))
    return derive(mesh, ranks, numbering)


def _of_written(layout: ModelLayout, mesh: Mesh, numbering: Numbering) -> DerivedLayout:
    """What is derived from numbers that lie where a hand-written layout says."""
    passes = {which: _checkpoint(numbering, which) for which in numbering.passes}
    ranks = []
    for rank in range(mesh.world_size):
        local = [
            (
                chunk, place.param_name, place.is_buffer,
                {which: place.shard(contents.__getitem__).numpy() for which, contents in passes.items()},
            )
            for chunk in range(mesh.vpp)
            for place in layout.placements(mesh, rank, chunk)
        ]  # fmt: skip
        ranks.append(held_by(local, numbering))
    return derive(mesh, ranks, numbering)


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(name=st.sampled_from(list(TINY)), mesh=meshes(most=16), bits=st.sampled_from([8, 24]))
def test_numbers_that_lie_as_a_row_says_give_that_row(name: str, mesh: Mesh, bits: int) -> None:
    shapes = shapes_of(name)
    layout = layout_of(config_of(name, **small_changes(name)))
    assert layout is not None
    derived = _of_written(layout, mesh, _numbering(shapes, bits))
    assert derived.gaps == ()
    assert differences(derived, layout, mesh, numbered(shapes)) == []
    assert derived.tied == (layout.tied and mesh.pp > 1)
    again = DerivedLayout.from_json(json.loads(json.dumps(derived.to_json())))
    assert again == derived


SHAPES = {"layers.0.up": (4, 6), "layers.0.down": (6, 4), "layers.0.norm": (4,)}
TP2 = Mesh(tp=2)


def _plain(rank: int, whole: Contents) -> Contents:
    rows = slice(2 * rank, 2 * rank + 2)
    return {
        "layers.0.up.weight": whole["layers.0.up"][rows],
        "layers.0.down.weight": whole["layers.0.down"][:, rows],
        "layers.0.norm.weight": whole["layers.0.norm"],
    }


def test_a_plain_import() -> None:
    derived = _derived(_numbering(SHAPES), TP2, _plain)
    assert derived.gaps == ()
    up, down, norm = derived.placements(TP2, 1)
    assert up.boxes == (Box("layers.0.up", 2, 4),)
    assert (down.dim, down.boxes) == (1, (Box("layers.0.down", 2, 4),))
    assert (norm.group, norm.replicated_over) == ("layers.0.norm.weight part 0", ("tp",))
    assert (up.group, up.replicated_over) == ("layers.0.up.weight part 1", ())


def _embedding_on_both_stages(rank: int, whole: Contents) -> Contents:
    return {"embedding": whole["embedding"], f"layers.{'0' if rank else '1'}.up": whole[f"layers.{rank}.up"]}


def test_a_second_copy_of_the_embedding_is_tied_to_the_first() -> None:
    """As the stage of a layer that predicts further tokens has it."""
    shapes, mesh = {"embedding": (4, 6), "layers.0.up": (4, 6), "layers.1.up": (4, 6)}, Mesh(pp=2)
    derived = _derived(_numbering(shapes), mesh, _embedding_on_both_stages)
    assert (derived.gaps, derived.tied) == ((), True)
    (first, _), (second, _) = (derived.placements(mesh, rank) for rank in range(2))
    assert (first.global_name, second.global_name) == ("embedding", "embedding (stage 1)")
    assert first.group == second.group


def test_a_layer_on_two_stages_is_no_copy() -> None:
    shapes, mesh = {"layers.0.up": (4, 6), "layers.1.up": (4, 6)}, Mesh(pp=2)
    derived = _derived(_numbering(shapes), mesh, lambda _, whole: {"layers.0.up": whole["layers.0.up"]})
    assert any("`layers.0.up` is on stage 0 and on stage 1" in gap for gap in derived.gaps), derived.gaps


@pytest.mark.parametrize("bits", [8, 24])
def test_an_import_that_shifts_scales_transposes_and_takes_experts_apart_is_joined(bits: int) -> None:
    shapes = {"layers.3.experts.up": (4, 6, 8), "layers.3.norm": (5,), "layers.3.half": (9, 40)}
    mesh = Mesh(tp=2, ep=2)

    def load(rank: int, whole: Contents) -> Contents:
        stack = whole["layers.3.experts.up"]
        experts = {f"layers.0.experts.fc1.weight{at}": stack[2 * rank + at].T.contiguous() for at in range(2)}
        return {
            **experts,
            "layers.0.norm.weight": 1 + whole["layers.3.norm"],
            "layers.0.half": 0.5 * whole["layers.3.half"],
        }

    numbering = _numbering(shapes, bits)
    derived = _derived(numbering, mesh, load)
    assert derived.gaps == ()
    first, second, norm, half = derived.placements(mesh, 1)
    assert [place.global_name for place in (first, second)] == [f"layers.3.experts.fc1.weight{at}" for at in (2, 3)]
    assert (second.transposed, second.boxes, second.shape) == (True, (Box("layers.3.experts.up", 0, 8, 3),), (8, 6))
    assert (norm.scale, norm.offset, half.scale, half.offset) == (1, 1, 0.5, 0)

    real = {name: torch.rand(shape, dtype=torch.float64) for name, shape in shapes.items()}
    owners = {place.group: (place, load(rank, real)[place.param_name])
              for rank in (1, 0) for place in derived.placements(mesh, rank)}  # fmt: skip
    for place, local in owners.values():
        assert torch.equal(place.shard(real.__getitem__), local)
    joined = dict(unshard(owners.values()))
    assert {name: torch.allclose(joined[name], real[name]) for name in real} == dict.fromkeys(real, True)
    slopes = dict(unshard([(place, torch.ones(place.shape)) for place, _ in owners.values()], gradients=True))
    assert [float(slopes[name].unique()) for name in sorted(shapes)] == [1.0, 0.5, 1.0]
    found = Owners(derived.placements, mesh)
    assert [found.rank_of("layers.3.experts.up", (at, 5, 7)) for at in range(4)] == [0, 0, 1, 1]


def _gaps(change: Import, mesh: Mesh = TP2, bits: int = 24) -> tuple[str, ...]:
    """What is lacking where the plain import is changed."""
    return _derived(_numbering(SHAPES, bits), mesh, lambda rank, whole: _plain(rank, whole) | change(rank, whole)).gaps


def test_an_import_that_leaves_a_row_out() -> None:
    def change(rank: int, whole: Contents) -> Contents:
        return {"layers.0.up.weight": whole["layers.0.up"][[0, 2] if rank else [0, 1]]}

    assert _gaps(change) == ("`layers.0.up`: overlap or empty box at index 0 (next box begins at 0)",)


def test_a_tensor_that_is_in_no_parameter() -> None:
    numbering = _numbering({**SHAPES, "layers.0.rotary": (3,)})
    assert _derived(numbering, TP2, _plain).gaps == ("`layers.0.rotary` of the checkpoint is in no parameter",)


def test_a_parameter_that_is_not_loaded() -> None:
    norm = torch.full((4,), np.nan, dtype=torch.float64)
    gaps = _gaps(lambda rank, whole: {"layers.0.norm.weight": norm} if rank else {})
    assert gaps == (
        "`layers.0.norm.weight` on rank 1: 4 of 4 elements were not loaded from the checkpoint",
        "`layers.0.norm.weight`: 1 of the stage's 2 ranks have it (layers.0.norm.weight)",
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (torch.exp, "it is no copy of the checkpoint's values, scaled and shifted: numbers come out as others"),
        (
            lambda norm: (norm + norm.roll(1)) / 2,
            "it is no copy of the checkpoint's values, scaled and shifted: numbers come out as others",
        ),
        (
            lambda norm: (norm.roll(-1) + norm.roll(1)) / 2,
            "it is no copy of the checkpoint's values: scrambled numbers come from other elements",
        ),
        (torch.zeros_like, "4 of 4 elements do not depend on the checkpoint"),
        (
            lambda norm: norm * torch.tensor([1.0, 1.0, 1.0, 2.0]),
            "scale or offset of the checkpoint's values differ within it",
        ),
        (lambda norm: norm[[0, 1, 3, 2]][:3][[0, 2, 1]].repeat(2)[:4].reshape(2, 2),
         "its elements are no whole rows or columns of the checkpoint's"),
    ],
    ids=["exp", "mean of two", "mean around one", "constant", "two scales", "reshaped"],
)  # fmt: skip
def test_a_parameter_that_is_no_copy(change: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
    gaps = _gaps(lambda rank, whole: {"layers.0.norm.weight": change(whole["layers.0.norm"]).double()})
    assert gaps[:2] == (f"`layers.0.norm.weight` on rank 0: {why}", f"`layers.0.norm.weight` on rank 1: {why}")


def test_copies_that_differ() -> None:
    """Rank 1 holds another layer's norm in the place of the copy that rank 0 has."""
    shapes = {"layers.0.norm": (4,), "layers.1.norm": (4,)}

    def load(rank: int, whole: Contents) -> Contents:
        return {
            "layers.0.norm.weight": whole["layers.1.norm" if rank else "layers.0.norm"],
            "layers.1.norm.weight": whole["layers.1.norm"],
        }

    assert _derived(_numbering(shapes), TP2, load).gaps[0] == (
        "`layers.0.norm.weight` holds `layers.0.norm` on rank 0 and `layers.1.norm` on rank 1"
    )


def test_a_copy_of_another_tensor_of_the_layer() -> None:
    shapes = {"layers.0.q_norm": (4,), "layers.0.k_norm": (4,)}

    def load(rank: int, whole: Contents) -> Contents:
        return {
            "layers.0.q.weight": whole["layers.0.k_norm" if rank else "layers.0.q_norm"],
            "layers.0.k.weight": whole["layers.0.k_norm"],
        }

    gaps = _derived(_numbering(shapes), TP2, load).gaps
    assert gaps == ("`layers.0.k.weight` and `layers.0.q.weight` have some parts in common and not all",)


def test_copies_along_no_axes() -> None:
    mesh = Mesh(tp=2, dp=2)

    def load(rank: int, whole: Contents) -> Contents:
        return _plain({0: 0, 1: 1, 2: 1, 3: 0}[rank], whole)

    assert _derived(_numbering(SHAPES), mesh, load).gaps == (
        "`layers.0.up.weight`: ranks [0, 3] hold the same elements, which is along no axes of the mesh",
        "`layers.0.down.weight`: ranks [0, 3] hold the same elements, which is along no axes of the mesh",
        "`layers.0.up.weight`: ranks [1, 2] hold the same elements, which is along no axes of the mesh",
        "`layers.0.down.weight`: ranks [1, 2] hold the same elements, which is along no axes of the mesh",
    )


def test_swapped_tensors_of_one_layer_are_not_seen() -> None:
    """What a derived layout cannot show: an import that errs alike on all ranks is the layout."""
    shapes = {"layers.0.q_norm": (4,), "layers.0.k_norm": (4,)}
    swapped = {"layers.0.q.weight": "layers.0.k_norm", "layers.0.k.weight": "layers.0.q_norm"}
    load: Import = lambda rank, whole: {name: whole[source] for name, source in swapped.items()}  # noqa: E731
    assert _derived(_numbering(shapes), TP2, load).gaps == ()


def test_another_mesh_is_refused() -> None:
    derived = _derived(_numbering(SHAPES), TP2, _plain)
    with pytest.raises(ContractError) as caught:
        derived.placements(Mesh(dp=2), 0)
    assert str(caught.value) == "the layout was derived on tp2, not on dp2"


def test_what_is_held_goes_through_json() -> None:
    import msgspec

    held = Held(chunk=1, name="p", is_buffer=True, dim=1, transposed=True, boxes=(Box("a", 0, 3, 2),), offset=1.0)
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(held))), Held) == held
