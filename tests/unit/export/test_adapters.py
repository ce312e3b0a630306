"""Adapters cut over ranks and joined again; a fused linear's parts share one A."""

from __future__ import annotations

import pytest
import torch

from verifier.export.names import ModelLayout, adapters_of, layout_of
from verifier.export.sharding import unshard
from verifier.mesh import Mesh
from verifier.model.families import FAMILIES
from verifier.model.tiny import TINY

RANK = 8
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _layout(model: str) -> ModelLayout:
    family, config = TINY[model]
    found = layout_of({"architectures": [FAMILIES[family].architecture], **config})
    assert found is not None
    return found


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(tp=4, pp=2), Mesh(tp=2, pp=2, vpp=2), Mesh(dp=2, cp=2)])
def test_joined_shards_are_the_whole_adapters(mesh: Mesh) -> None:
    adapters = adapters_of(_layout("qwen3"), TARGETS, RANK)
    whole: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        return whole[name]

    shards = {}
    for rank in range(mesh.world_size):
        for chunk in range(mesh.vpp):
            for place in adapters.placements(mesh, rank, chunk):
                for name, shape in place.source_shapes.items():
                    whole.setdefault(name, torch.randn(shape))
                shards[place.group] = (place, place.shard(read))
    joined = dict(unshard(shards.values()))
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    published = dict(adapters.spread(joined))
    assert len(published) == 4 * 7 * 2
    first = "model.layers.3.self_attn.q_proj.lora_A.weight"
    assert published[first].shape == (RANK, 96)
    assert published[first.replace("q_proj", "v_proj")] is published[first]
    assert published["model.layers.0.mlp.down_proj.lora_A.weight"].shape == (RANK, 128)


def test_rows_of_a_fused_b_are_cut_as_the_linears_own() -> None:
    """Rank 1 of 2 holds the query, key and value rows of the last two of four groups, group by group."""
    adapters = adapters_of(_layout("qwen3"), TARGETS, RANK)
    place = next(
        item for item in adapters.placements(Mesh(tp=2), 1) if item.param_name.endswith("qkv.adapter.linear_out.weight")
    )
    rows = [(box.source.split(".")[4], box.begin, box.end) for box in place.boxes]
    assert rows == [
        ("q_proj", 128, 192), ("k_proj", 64, 96), ("v_proj", 64, 96),
        ("q_proj", 192, 256), ("k_proj", 96, 128), ("v_proj", 96, 128),
    ]  # fmt: skip
