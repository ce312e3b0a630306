"""Layouts of the hand-written families on many meshes, and two layouts of one model element by element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from verifier.export.names import ModelLayout
from verifier.export.sharding import ParamPlacement
from verifier.mesh import Mesh
from verifier.model.families import FAMILIES, tensors_of
from verifier.model.tiny import TINY


def config_of(name: str, **changes: object) -> dict[str, Any]:
    """The config.json of a generated model with a hand-written row."""
    family, sizes = TINY[name]
    return {"architectures": [FAMILIES[family].architecture], **sizes, **changes}


def small_changes(name: str) -> dict[str, int]:
    """Other values for a model's config.json: as small as all meshes of `meshes` divide."""
    small = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    if "head_dim" in TINY[name][1]:
        small["head_dim"] = 4
    if name == "qwen3-moe-320":  # its two layers do not divide over four stages
        small["num_hidden_layers"] = 4
    if name == "qwen2":  # whose heads have hidden_size / num_attention_heads elements
        small |= {"hidden_size": 32, "num_attention_heads": 8}
    return small


@st.composite
def meshes(draw: st.DrawFn, most: int = 64) -> Mesh:
    """Meshes of up to `most` ranks that divide a model of 4 layers, 8 heads, 16 experts."""
    power = st.sampled_from([1, 2, 4, 8])
    tp, cp, dp, pp = draw(power), draw(power), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    while tp * cp * dp * pp > most:
        cp = max(1, cp // 2)
        dp = max(1, dp // 2)
        tp = tp if cp * dp > 1 else min(tp, most // pp)
    dense = tp * cp * dp
    etp = draw(st.sampled_from([size for size in (1, 2, 4) if size <= dense]))
    ep = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if size * etp <= dense]))
    vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    uneven = pp == 2 and vpp == 1 and draw(st.booleans())
    return Mesh(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=dp, vpp=vpp, first_stage_layers=1 if uneven else None)


@cache
def shapes_of(name: str, *, small: bool = True) -> Mapping[str, tuple[int, ...]]:
    """Tensor names, sorted, and shapes of a generated model, in the sizes of `small_changes` or in its own."""
    config = config_of(name, **(small_changes(name) if small else {}))
    return {spec.name: spec.shape for spec in sorted(tensors_of(FAMILIES[TINY[name][0]], config), key=lambda x: x.name)}


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Each element of the checkpoint has a value of its own, so that equal means the same element."""
    weights, at = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        weights[name] = torch.arange(at, at + size, dtype=torch.int64).view(shape)
        at += size
    return weights


def differences(derived: Any, written: ModelLayout, mesh: Mesh, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """What two layouts of one model on one mesh say otherwise: elements, names, groups, and axes of copies."""
    wrong, groups = [], (defaultdict(set), defaultdict(set))
    for rank in range(mesh.world_size):
        for chunk in range(mesh.vpp):
            one, other = (
                {place.param_name: place for place in layout.placements(mesh, rank, chunk)}
                for layout in (derived, written)
            )
            wrong += [f"rank {rank}: only one has `{name}`" for name in one.keys() ^ other.keys()]
            for name in one.keys() & other.keys():
                for place, members in zip((one[name], other[name]), groups, strict=True):
                    members[place.group].add((rank, chunk, name))
                if _facts(one[name], mesh) != _facts(other[name], mesh):
                    wrong.append(f"rank {rank} `{name}`: {_facts(one[name], mesh)} and {_facts(other[name], mesh)}")
                if not torch.equal(one[name].shard(weights.__getitem__), other[name].shard(weights.__getitem__)):
                    wrong.append(f"rank {rank} `{name}`: other elements")
    partitions = [{frozenset(members) for members in found.values()} for found in groups]
    if partitions[0] != partitions[1]:
        wrong.append(f"groups of replicas: {sorted(map(sorted, partitions[0] ^ partitions[1]))[:2]}")
    return wrong


def _facts(place: ParamPlacement, mesh: Mesh) -> tuple[Any, ...]:
    sizes = {"edp": mesh.expert_dp}
    axes = tuple(axis for axis in place.replicated_over if sizes.get(axis, getattr(mesh, axis, 1)) > 1)
    sources = {source: place.source_shapes[source] for source in sorted(place.sources)}
    name = place.global_name.partition(" (stage")[0]
    return name, place.is_buffer, place.shape, sources, axes, place.scale, place.offset, place.transposed
