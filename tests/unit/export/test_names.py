"""The layout oracle: written out by hand for small cases, and by property for all meshes.

What this does not exercise: that Megatron's ranks do hold these names and bits (tests/dist, on real ranks).
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts import config_of, meshes, numbered, small_changes
from verifier.errors import UsageError
from verifier.export.names import PARAMS, ModelLayout, layout_of
from verifier.export.sharding import Box, ParamPlacement, tiling_errors, unshard
from verifier.mesh import Mesh
from verifier.model.families import FAMILIES, tensors_of
from verifier.model.tiny import TINY

LAYER = "decoder.layers"


def _layout(name: str, **changes: object) -> ModelLayout:
    layout = layout_of(config_of(name, **changes))
    assert layout is not None
    return layout


def _weights(name: str, **changes: object) -> dict[str, torch.Tensor]:
    """Each element of the checkpoint has a value of its own, so that equal means the same element."""
    specs = tensors_of(FAMILIES[TINY[name][0]], config_of(name, **changes))
    return numbered({spec.name: spec.shape for spec in specs})


def _by_name(layout: ModelLayout, mesh: Mesh, rank: int = 0, chunk: int = 0) -> dict[str, ParamPlacement]:
    placements = layout.placements(mesh, rank, chunk)
    named = {placement.param_name: placement for placement in placements}
    assert len(named) == len(placements)
    return named


def test_every_family_has_its_params() -> None:
    assert PARAMS.keys() == FAMILIES.keys()


def test_a_layer_for_a_further_token_lies_on_the_last_stage_beside_a_copy_of_the_embedding() -> None:
    changes = {"num_nextn_predict_layers": 1}
    layout, mesh = _layout("deepseek-v3", **changes), Mesh(tp=2, pp=2, ep=2)
    ranks = [_by_name(layout, mesh, rank) for rank in range(mesh.world_size)]
    owners = {place.group: place for named in ranks for place in named.values()}
    assert tiling_errors(owners.values()) == {}
    assert {name for place in owners.values() for name in place.sources} == _weights("deepseek-v3", **changes).keys()
    first, last = ranks[0], ranks[-1]
    assert not any(name.startswith("mtp.") for name in first)
    assert last["mtp.layers.0.eh_proj.weight"].boxes == (Box("model.layers.4.eh_proj.weight", 48, 96),)
    down = last["mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2.weight0"]
    assert down.sources == ("model.layers.4.mlp.experts.8.down_proj.weight",)
    assert {name for name in first if "embedding" in name} == {name for name in last if "embedding" in name}


def test_a_config_without_a_row_has_no_layout() -> None:
    assert layout_of(config_of("qwen3", attention_bias=True)) is None


def test_qwen3_on_one_rank() -> None:
    named = _by_name(_layout("qwen3", num_hidden_layers=1), Mesh())
    assert {name: (placement.shape, placement.sources) for name, placement in named.items()} == {
        "embedding.word_embeddings.weight": ((512, 96), ("model.embed_tokens.weight",)),
        f"{LAYER}.0.self_attention.linear_qkv.layer_norm_weight": ((96,), ("model.layers.0.input_layernorm.weight",)),
        f"{LAYER}.0.self_attention.linear_qkv.weight": (
            (512, 96),
            tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
        ),
        f"{LAYER}.0.self_attention.linear_proj.weight": ((96, 256), ("model.layers.0.self_attn.o_proj.weight",)),
        f"{LAYER}.0.self_attention.q_layernorm.weight": ((32,), ("model.layers.0.self_attn.q_norm.weight",)),
        f"{LAYER}.0.self_attention.k_layernorm.weight": ((32,), ("model.layers.0.self_attn.k_norm.weight",)),
        f"{LAYER}.0.mlp.linear_fc1.layer_norm_weight": ((96,), ("model.layers.0.post_attention_layernorm.weight",)),
        f"{LAYER}.0.mlp.linear_fc1.weight": (
            (256, 96),
            ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ),
        f"{LAYER}.0.mlp.linear_fc2.weight": ((96, 128), ("model.layers.0.mlp.down_proj.weight",)),
        "decoder.final_layernorm.weight": ((96,), ("model.norm.weight",)),
        "output_layer.weight": ((512, 96), ("lm_head.weight",)),
    }


def test_deepseek_v3_names_of_a_dense_and_a_moe_layer() -> None:
    layout = _layout("deepseek-v3", num_hidden_layers=2, n_routed_experts=2)
    named = _by_name(layout, Mesh())
    mla = [
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
    ]
    dense = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    moe = [
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.linear_fc1.weight0",
        "mlp.experts.linear_fc1.weight1",
        "mlp.experts.linear_fc2.weight0",
        "mlp.experts.linear_fc2.weight1",
        "mlp.router.expert_bias",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
    ]
    assert list(named) == [
        "embedding.word_embeddings.weight",
        *(f"{LAYER}.0.{name}" for name in mla + dense),
        *(f"{LAYER}.1.{name}" for name in mla + moe),
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert [name for name, placement in named.items() if placement.is_buffer] == [f"{LAYER}.1.mlp.router.expert_bias"]


def test_qkv_rows_are_interleaved_per_group() -> None:
    changes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1}
    weights = _weights("qwen3", **changes)
    q, k, v = (weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    name = f"{LAYER}.0.self_attention.linear_qkv.weight"
    expected = torch.stack([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])
    for tp in (1, 2, 4):  # with tp = 4 there are more ranks than groups
        for rank in range(tp):
            placement = _by_name(_layout("qwen3", **changes), Mesh(tp=tp), rank)[name]
            assert torch.equal(placement.shard(weights.__getitem__), expected.chunk(tp)[rank])


def test_qkv_biases_are_interleaved_as_the_rows_are() -> None:
    changes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1}
    weights = _weights("qwen2", **changes)
    q, k, v = (weights[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv")
    placement = _by_name(_layout("qwen2", **changes), Mesh(tp=2), 1)[f"{LAYER}.0.self_attention.linear_qkv.bias"]
    assert placement.shape == (4,)
    assert torch.equal(placement.shard(weights.__getitem__), torch.stack([q[2], q[3], k[1], v[1]]))


def test_each_tp_shard_holds_its_gate_above_its_up() -> None:
    weights = _weights("qwen3")
    gate, up = (weights[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    placement = _by_name(_layout("qwen3"), Mesh(tp=2), rank=1)[f"{LAYER}.2.mlp.linear_fc1.weight"]
    assert torch.equal(placement.shard(weights.__getitem__), torch.cat([gate[64:], up[64:]]))


def test_experts_are_numbered_locally_and_cut_by_etp() -> None:
    weights = _weights("qwen3-moe")
    mesh = Mesh(tp=2, ep=4, etp=2, dp=4)
    layout = _layout("qwen3-moe")
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        named = _by_name(layout, mesh, rank)
        experts = [name for name in named if ".3.mlp.experts.linear_fc2" in name]
        assert experts == [f"{LAYER}.3.mlp.experts.linear_fc2.weight{local}" for local in range(4)]
        placement = named[experts[1]]
        expert = at.ep * 4 + 1
        assert placement.global_name == f"{LAYER}.3.mlp.experts.linear_fc2.weight{expert}"
        down = weights[f"model.layers.3.mlp.experts.{expert}.down_proj.weight"]
        assert torch.equal(placement.shard(weights.__getitem__), down[:, at.etp * 32 : at.etp * 32 + 32])


@pytest.mark.parametrize(
    ("mesh", "chunk_layers"),
    [
        (Mesh(pp=2), {(0, 0): [0, 1], (1, 0): [2, 3]}),
        (Mesh(pp=2, vpp=2), {(0, 0): [0], (1, 0): [1], (0, 1): [2], (1, 1): [3]}),
        (Mesh(pp=2, first_stage_layers=1), {(0, 0): [0], (1, 0): [1, 2, 3]}),
        (Mesh(pp=3, first_stage_layers=1, last_stage_layers=1), {(0, 0): [0], (1, 0): [1, 2], (2, 0): [3]}),
    ],
    ids=lambda value: value.label() if isinstance(value, Mesh) else "",
)
def test_stages_number_their_layers_locally(mesh: Mesh, chunk_layers: dict[tuple[int, int], list[int]]) -> None:
    for (rank, chunk), layers in chunk_layers.items():
        named = _by_name(_layout("llama"), mesh, rank, chunk)
        norms = {name: item.sources[0] for name, item in named.items() if name.endswith("linear_fc1.layer_norm_weight")}
        assert norms == {
            f"{LAYER}.{local}.mlp.linear_fc1.layer_norm_weight": (
                f"model.layers.{layer}.post_attention_layernorm.weight"
            )
            for local, layer in enumerate(layers)
        }
        assert ("embedding.word_embeddings.weight" in named) == (0 in layers)
        assert ("output_layer.weight" in named) == (3 in layers)
        assert ("decoder.final_layernorm.weight" in named) == (3 in layers)


def test_a_tied_output_layer_is_a_copy_on_the_last_stage_only() -> None:
    layout = _layout("qwen3-tied")
    assert "output_layer.weight" not in _by_name(layout, Mesh(tp=2), rank=1)
    mesh = Mesh(tp=2, pp=2)
    embedding = _by_name(layout, mesh, rank=1)["embedding.word_embeddings.weight"]
    output = _by_name(layout, mesh, rank=3)["output_layer.weight"]
    assert output.boxes == embedding.boxes
    assert output.group == embedding.group == "embedding.word_embeddings.weight tp 1/2"


def test_hybrid_names_of_each_kind_of_layer() -> None:
    layout = _layout("nemotron-h", num_hidden_layers=4, hybrid_override_pattern="M*-E", n_routed_experts=1)
    named = _by_name(layout, Mesh())
    prefix = "backbone.layers"
    assert {name: (placement.shape, placement.sources) for name, placement in named.items()} == {
        "embedding.word_embeddings.weight": ((512, 96), ("backbone.embeddings.weight",)),
        f"{LAYER}.0.mixer.conv1d_weight": ((256, 1, 4), (f"{prefix}.0.mixer.conv1d.weight",)),
        f"{LAYER}.0.mixer.conv1d_bias": ((256,), (f"{prefix}.0.mixer.conv1d.bias",)),
        f"{LAYER}.0.mixer.dt_bias": ((16,), (f"{prefix}.0.mixer.dt_bias",)),
        f"{LAYER}.0.mixer.A_log": ((16,), (f"{prefix}.0.mixer.A_log",)),
        f"{LAYER}.0.mixer.D": ((16,), (f"{prefix}.0.mixer.D",)),
        f"{LAYER}.0.mixer.in_proj.layer_norm_weight": ((96,), (f"{prefix}.0.norm.weight",)),
        f"{LAYER}.0.mixer.in_proj.weight": ((400, 96), (f"{prefix}.0.mixer.in_proj.weight",)),
        f"{LAYER}.0.mixer.norm.weight": ((128,), (f"{prefix}.0.mixer.norm.weight",)),
        f"{LAYER}.0.mixer.out_proj.weight": ((96, 128), (f"{prefix}.0.mixer.out_proj.weight",)),
        f"{LAYER}.1.self_attention.linear_qkv.layer_norm_weight": ((96,), (f"{prefix}.1.norm.weight",)),
        f"{LAYER}.1.self_attention.linear_qkv.weight": (
            (512, 96),
            tuple(f"{prefix}.1.mixer.{part}_proj.weight" for part in "qkv"),
        ),
        f"{LAYER}.1.self_attention.linear_proj.weight": ((96, 256), (f"{prefix}.1.mixer.o_proj.weight",)),
        f"{LAYER}.2.mlp.linear_fc1.layer_norm_weight": ((96,), (f"{prefix}.2.norm.weight",)),
        f"{LAYER}.2.mlp.linear_fc1.weight": ((128, 96), (f"{prefix}.2.mixer.up_proj.weight",)),
        f"{LAYER}.2.mlp.linear_fc2.weight": ((96, 128), (f"{prefix}.2.mixer.down_proj.weight",)),
        f"{LAYER}.3.pre_mlp_layernorm.weight": ((96,), (f"{prefix}.3.norm.weight",)),
        f"{LAYER}.3.mlp.router.weight": ((1, 96), (f"{prefix}.3.mixer.gate.weight",)),
        f"{LAYER}.3.mlp.router.expert_bias": ((1,), (f"{prefix}.3.mixer.gate.e_score_correction_bias",)),
        f"{LAYER}.3.mlp.experts.linear_fc1.weight0": ((64, 96), (f"{prefix}.3.mixer.experts.0.up_proj.weight",)),
        f"{LAYER}.3.mlp.experts.linear_fc2.weight0": ((96, 64), (f"{prefix}.3.mixer.experts.0.down_proj.weight",)),
        f"{LAYER}.3.mlp.shared_experts.linear_fc1.weight": (
            (128, 96),
            (f"{prefix}.3.mixer.shared_experts.up_proj.weight",),
        ),
        f"{LAYER}.3.mlp.shared_experts.linear_fc2.weight": (
            (96, 128),
            (f"{prefix}.3.mixer.shared_experts.down_proj.weight",),
        ),
        "decoder.final_norm.weight": ((96,), ("backbone.norm_f.weight",)),
        "output_layer.weight": ((512, 96), ("lm_head.weight",)),
    }


def test_a_rank_holds_its_part_of_z_x_b_c_and_dt() -> None:
    named = _by_name(_layout("nemotron-h"), Mesh(tp=4), rank=1)
    spans = {name: [(box.begin, box.end) for box in item.boxes] for name, item in named.items()}
    assert spans[f"{LAYER}.0.mixer.in_proj.weight"] == [(32, 64), (160, 192), (272, 288), (336, 352), (388, 392)]
    assert spans[f"{LAYER}.0.mixer.conv1d_weight"] == [(32, 64), (144, 160), (208, 224)]
    assert spans[f"{LAYER}.0.mixer.A_log"] == [(4, 8)]
    assert spans[f"{LAYER}.0.mixer.norm.weight"] == [(32, 64)]


def test_replica_axes() -> None:
    named = _by_name(_layout("deepseek-v3"), Mesh(tp=2, ep=2, etp=2, dp=2, cp=2))
    axes = {name.removeprefix(f"{LAYER}.1."): item.replicated_over for name, item in named.items()}
    assert axes["pre_mlp_layernorm.weight"] == ("tp", "cp", "dp")
    assert axes["self_attention.linear_q_down_proj.weight"] == ("tp", "cp", "dp")
    assert axes["mlp.router.expert_bias"] == ("tp", "cp", "dp")
    assert axes["self_attention.linear_q_up_proj.weight"] == ("cp", "dp")
    assert axes["mlp.shared_experts.linear_fc2.weight"] == ("cp", "dp")
    assert axes["mlp.experts.linear_fc1.weight0"] == ("edp",)


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("qwen3", Mesh(tp=3), "tp = 3 does not divide the 512 indices of `embedding.word_embeddings.weight`"),
        ("qwen3-moe", Mesh(ep=3, dp=3), "ep = 3 does not divide the model's 16 experts"),
        (
            "qwen3-moe",
            Mesh(etp=3, dp=3),
            "etp = 3 does not divide the 64 indices of `decoder.layers.0.mlp.experts.linear_fc1.weight0`",
        ),
        (
            "nemotron-h",
            Mesh(tp=3),
            "tp = 3 does not divide the 512 indices of `embedding.word_embeddings.weight`",
        ),
        (
            "qwen3",
            Mesh(pp=3),
            "4 layers do not divide over pp * vpp = 3 * 1 chunks: give --first-stage-layers or --last-stage-layers, "
            "or other sizes",
        ),
    ],
    ids=lambda value: value.label() if isinstance(value, Mesh) else "",
)
def test_a_mesh_that_does_not_divide_is_refused(name: str, mesh: Mesh, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        _layout(name).placements(mesh, 0)
    assert str(caught.value) == message


def test_query_rows_that_do_not_divide_are_refused() -> None:
    layout = _layout("qwen3", vocab_size=513, num_attention_heads=3, num_key_value_heads=1, head_dim=32)
    with pytest.raises(UsageError) as caught:
        layout.placements(Mesh(tp=3), 0)
    assert str(caught.value) == (
        "tp = 3 does not divide the 160 rows of `decoder.layers.0.self_attention.linear_qkv.weight` in 1 groups"
    )


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(list(TINY)), mesh=meshes())
def test_shards_tile_join_and_replicate(name: str, mesh: Mesh) -> None:
    small = small_changes(name)
    weights = _weights(name, **small)
    layout = _layout(name, **small)
    groups: dict[str, list[tuple[int, ParamPlacement]]] = defaultdict(list)
    for rank in range(mesh.world_size):
        for chunk in range(mesh.vpp):
            for placement in layout.placements(mesh, rank, chunk):
                groups[placement.group].append((rank, placement))

    owners = []
    for members in groups.values():
        _, first = members[0]
        owners.append(first)
        for _, other in members:
            assert other.boxes == first.boxes
            assert other.dim == first.dim
            assert other.shape == first.shape
            assert other.replicated_over == first.replicated_over
        _check_copies_lie_along_their_axes(mesh, members)

    assert not tiling_errors(owners)
    joined = dict(unshard([(placement, placement.shard(weights.__getitem__)) for placement in owners]))
    assert joined.keys() == weights.keys()
    for tensor_name, tensor in weights.items():
        assert torch.equal(joined[tensor_name], tensor), tensor_name


def _check_copies_lie_along_their_axes(mesh: Mesh, members: list[tuple[int, ParamPlacement]]) -> None:
    """As many copies as the axes' sizes say, each at its own coordinates along them and all else equal."""
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "edp": mesh.expert_dp}
    by_name: dict[str, list[int]] = defaultdict(list)
    for rank, placement in members:
        by_name[placement.param_name if placement.param_name == "output_layer.weight" else ""].append(rank)
    for ranks in by_name.values():
        axes = members[0][1].replicated_over
        num_copies = 1
        for axis in axes:
            num_copies *= sizes[axis]
        along = {tuple(getattr(mesh.coordinate(rank), axis) for axis in axes) for rank in ranks}
        assert len(ranks) == len(along) == num_copies
