"""Every element of a checkpoint tensor has an owner, which holds it."""

from __future__ import annotations

import pytest
import torch

from verifier.export.names import layout_of
from verifier.export.sharding import Owners
from verifier.mesh import Mesh
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.oracle.gradients_hf import greatest


@pytest.mark.parametrize("mesh", [Mesh(tp=2, pp=2), Mesh(tp=2, ep=2, dp=2)])
def test_the_owner_of_an_element_holds_it(mesh, tmp_path):
    source = open_checkpoint(write_tiny("qwen3-moe", tmp_path))
    layout = layout_of(source.config)
    owners = Owners(layout.placements, mesh)
    for name in source.names():
        for index in ([0] * len(source.read(name).shape), [size - 1 for size in source.read(name).shape]):
            rank = owners.rank_of(name, index)
            boxes = [
                (place.dim, box)
                for chunk in range(mesh.vpp)
                for place in layout.placements(mesh, rank, chunk)
                for box in place.boxes
            ]
            assert any(box.source == name and box.begin <= index[dim] < box.end for dim, box in boxes)
    assert owners.rank_of("another", [0]) is None


def test_the_greatest_element_and_its_index():
    gaps = torch.zeros(2, 3)
    assert greatest(gaps) == (0.0, [0, 0])
    gaps[1, 2] = 4.0
    assert greatest(gaps) == (4.0, [1, 2])
    gaps[0, 1] = torch.nan
    assert greatest(gaps)[1] == [0, 1]
    assert greatest(torch.tensor(2.0)) == (2.0, [])
