"""Elements of a state are the same ones of a checkpoint on any mesh, and all of them are held by some rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.json import encode

from verifier.export.names import layout_of
from verifier.export.sharding import Box, ParamPlacement
from verifier.mesh import Mesh
from verifier.model.tiny import tiny_config
from verifier.stages.checkpoint.probe_loaded_state_megatron import ABSENT, read_elements, record_elements
from verifier.trainer.state_megatron import _cut, chosen_in


def held(mesh: Mesh, name: str) -> dict[str, dict[int, float]]:
    """Chosen elements that the ranks of a mesh hold, and the value there of a checkpoint that counts its elements."""
    layout = layout_of(tiny_config(name, "float32"))
    assert layout is not None
    found: dict[str, dict[int, float]] = {}
    for rank in range(mesh.world_size):
        for chunk in range(mesh.vpp):
            for place in layout.placements(mesh, rank, chunk):
                whole = {
                    source: torch.arange(np.prod(shape), dtype=torch.float64).view(shape)
                    for source, shape in place.source_shapes.items()
                }
                flat = place.shard(whole.__getitem__).view(-1)
                for source, index, local in chosen_in(place):
                    found.setdefault(source, {}).update(zip(index.tolist(), flat[local].tolist(), strict=True))
    return found


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("qwen3-tied", Mesh(tp=2, pp=2)), ("qwen3-moe", Mesh(tp=2, ep=2, etp=1)), ("qwen3-moe", Mesh(pp=2, vpp=2))],
)
def test_any_mesh_holds_the_same_elements_and_they_lie_where_they_are_looked_for(name: str, mesh: Mesh) -> None:
    found = held(mesh, name)
    assert found == held(Mesh(), name)
    assert all(index == value for values in found.values() for index, value in values.items())


def test_an_expert_of_a_stack_that_is_transposed_is_found() -> None:
    place = ParamPlacement(
        param_name="w", global_name="w", is_buffer=False, dim=1, boxes=(Box("s", 1, 3, 2), Box("s", 0, 1, 2)),
        source_shapes={"s": (4, 3, 5)}, group="w", replicated_over=(), transposed=True,
    )  # fmt: skip
    flat = place.shard(lambda name: torch.arange(60.0).view(4, 3, 5)).view(-1)
    pieces = list(chosen_in(place))
    assert all(np.array_equal(flat[local], index) for _, index, local in pieces)
    chosen = {int(index) for _, whole, _ in pieces for index in whole}
    assert len(chosen) > 10
    assert chosen <= set(range(30, 45))


def test_a_part_of_a_tensor_has_the_elements_of_its_range() -> None:
    place = ParamPlacement(
        param_name="w", global_name="w", is_buffer=False, dim=0, boxes=(Box("s", 0, 8),), source_shapes={"s": (8,)},
        group="w", replicated_over=(),
    )  # fmt: skip
    values = torch.arange(8.0)
    indices, bits = _cut([(place, 3, values[3:6])])["s"]
    assert set(indices) <= {3, 4, 5}
    assert [float(np.uint32(item).view(np.float32)) for item in bits] == indices


def test_what_other_ranks_saved_stands_beside_what_a_rank_loads(tmp_path) -> None:
    (tmp_path / "0.json").write_bytes(encode({"master": {"a": ([1, 2], [10, 20])}}))
    (tmp_path / "1.json").write_bytes(encode({"master": {"a": ([2, 5], [99, 50]), "b": ([0], [7])}}))
    saved = read_elements([tmp_path / "0.json", tmp_path / "1.json"])
    found: list[Any] = []
    probe = SimpleNamespace(emit=lambda *given: found.append(given))
    record_elements(probe, saved, {"master": {"a": ([2, 3], [20, 30])}}, 4, "tp=0")  # type: ignore[arg-type]
    (record, arrays) = found[0]
    assert (record.name, record.tensors, record.counts, record.saved_elements) == ("master", ("a",), (2,), 4)
    assert {name: values.tolist() for name, values in arrays.items()} == {
        "index": [2, 3], "saved": [20, ABSENT], "loaded": [20, 30]
    }  # fmt: skip
