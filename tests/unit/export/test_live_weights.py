from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from verifier.errors import ContractError
from verifier.export.live_weights import LiveWeights
from verifier.export.sharding import Box, ParamPlacement
from verifier.mesh import Mesh

P = ParamPlacement(
    param_name="p", global_name="p", is_buffer=False, dim=0, boxes=(Box("a", 0, 2), Box("b", 1, 2)),
    source_shapes={"a": (4, 3), "b": (2, 3)}, group="p", replicated_over=("dp",),
)  # fmt: skip
Q = replace(P, param_name="q", global_name="q", group="q", boxes=(Box("b", 0, 1), Box("a", 2, 4)))
TIED = replace(Q, param_name="tied")
"""A further copy of `q` on the same rank."""


class Layout:
    """Where the tensors of a made-up model live: all on every rank, or half of them on each."""

    def __init__(self, *placements: ParamPlacement, split: bool = False) -> None:
        self._placements, self._split = placements, split

    def placements(self, mesh: Mesh, rank: int, chunk: int) -> tuple[ParamPlacement, ...]:
        return self._placements[rank : rank + 1] if self._split else self._placements


def live(layout: Any, mesh: Mesh, rank: int = 0) -> LiveWeights:
    module = nn.Module()
    for at, name in enumerate(("p", "q", "tied")):
        module.register_parameter(name, nn.Parameter(torch.arange(9.0).view(3, 3) + 10 * min(at, 1)))
    return LiveWeights([module], layout, mesh, rank)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)])
def test_one_owner_joins_in_memory_what_it_would_join_from_files(mesh: Mesh, tmp_path: Path) -> None:
    weights = live(Layout(P, Q, TIED), mesh)
    assert weights.owns_all
    weights.dump(tmp_path, weights.tensors())
    joined, read = dict(weights.join_own(weights.tensors())), dict(weights.join(tmp_path))
    assert joined.keys() == read.keys() == {"a", "b"}
    assert all(torch.equal(joined[name], read[name]) for name in read)


def test_shards_of_two_ranks_are_joined_from_files() -> None:
    owned = [replace(each, replicated_over=()) for each in (P, Q)]
    assert not live(Layout(*owned, split=True), Mesh(dp=2)).owns_all


@pytest.mark.parametrize("given", [("p",), ("q",)])
def test_tensors_that_did_not_come_are_refused(given: tuple[str, ...]) -> None:
    weights = live(Layout(P, Q), Mesh())
    some = [item for item in weights.tensors() if item[1] in given]
    with pytest.raises(ContractError, match="elements are on no rank"):
        dict(weights.join_own(some))


def test_a_hole_is_refused() -> None:
    weights = live(Layout(P), Mesh())
    with pytest.raises(ContractError, match="boxes cover"):
        weights.join_own(weights.tensors())
