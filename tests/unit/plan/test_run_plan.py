"""Plans of published models: their sizes by hand, their memory by hand, and each contradiction shown.

What this does not exercise: that ranks hold and export what the plan says (tests/dist/test_plan.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from verifier.config import PlanConfig
from verifier.export.sharding import ParamPlacement
from verifier.mesh import Mesh
from verifier.model.tiny import tiny_config
from verifier.plan import run_plan as plans
from verifier.plan.held_shards import BUFFERS, activation_bytes, holdings_of, layer_elements, rank_bytes
from verifier.plan.run_plan import GIB, MEASURED_GB_S, MEASURED_IN, plan_errors, ranges, run_plan
from verifier.transport.cuda_ipc import SLOTS
from verifier.transport.wire import AHEAD

ROOT = Path(__file__).parents[3]
PUBLISHED = Path(__file__).parent / "published"
DEEPSEEK = Mesh(tp=8, pp=16, ep=32, dp=8, last_stage_layers=1)


def bf16(mesh, **knobs):
    return PlanConfig(**{"model": "any", "dtype": "bfloat16", "mesh": mesh} | knobs)


def published(name, **changes):
    return json.loads((PUBLISHED / name / "config.json").read_text()) | changes


def tiny(mesh, name="qwen3-moe", **knobs):
    config = PlanConfig(**{"model": "any", "dtype": "float32", "mesh": mesh, "max_chunk_mib": 64} | knobs)
    return run_plan(config, tiny_config(name, "float32"))


@pytest.fixture(scope="module")
def deepseek():
    return run_plan(bf16(DEEPSEEK), published("deepseek-v3"))


@pytest.mark.slow
def test_deepseek_v3_has_671_billion_parameters(deepseek):
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    dense, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 256 * 7168
    layers = 61 * (attention + 2 * 7168) + 3 * dense + 58 * (257 * expert + router)
    assert deepseek.num_parameters == layers + 2 * 129280 * 7168 + 7168 == 671_026_404_352
    assert deepseek.num_bytes == 2 * deepseek.num_parameters + 4 * 58 * 256  # and the routers' score biases
    assert deepseek.left_out == (
        "layers that predict further tokens (MTP), of which config.json names 1",
        "the quantization of the checkpoint: the plan is of weights in bfloat16",
    )


@pytest.mark.slow
def test_qwen3_235b_has_235_billion_parameters():
    plan = run_plan(bf16(Mesh(tp=8)), published("qwen3-235b-a22b"))  # the model is the same where the mesh is wrong
    attention = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096 + 2 * 128
    layer = attention + 2 * 4096 + 128 * 3 * 4096 * 1536 + 128 * 4096
    assert plan.num_parameters == 94 * layer + 2 * 151936 * 4096 + 4096 == 235_093_634_560


def test_a_published_model_on_its_mesh_is_sound(deepseek):
    assert deepseek.contradictions == ()
    made = deepseek.made
    assert [len(item.ranks) for item in made.plans] == [1024]
    assert sum(len(item.ranks) for item in made.holdings) == 1024
    owned = sum(math.prod(item.place.shape) for item in made.ownership.replicas.values())
    assert owned == deepseek.num_parameters + 58 * 256


def test_memory_of_a_rank_is_that_of_its_parameters_by_hand(deepseek):
    """DeepSeek-V3, stage 1: four layers with 8 of 256 experts each, attention and shared expert over tp = 8."""
    made = deepseek.made
    index, holding = next((place, item) for place, item in enumerate(made.holdings) if item.at.pp == 1)
    norms = 2 * 7168 + 1536 + 512
    whole = 7168 * 1536 + 7168 * 576 + norms + 256 * 7168
    divided = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 3 * 7168 * 2048
    dense, expert = 4 * (whole + divided // 8), 4 * 8 * 3 * 7168 * 2048
    assert (holding.count(expert=False), holding.count(expert=True)) == (dense, expert)
    memory = made.bytes_of(index, holding.ranks[0])
    assert memory.weights == 2 * (dense + expert) + 4 * 4 * 256
    assert memory.gradients == 4 * (dense + expert)
    assert memory.optimizer == 12 * (math.ceil(dense / 8) + expert // 2)  # dp = 8; 64 ranks hold 32 parts of experts
    alone = bf16(DEEPSEEK, distributed_optimizer=False, grad_reduce_in_fp32=False)
    memory = rank_bytes(holding, alone, deepseek.dtype_of, transfer=0, activations=0)
    assert (memory.gradients, memory.optimizer) == (2 * (dense + expert), 12 * (dense + expert))


def test_parameters_in_fp32_have_no_master():
    memory = tiny(Mesh()).made.bytes_of(0, 0)
    assert memory.optimizer == 2 * memory.weights == 2 * memory.gradients


def test_rank_0_holds_what_it_sends():
    plan = tiny(Mesh(dp=2))
    first, second = (plan.made.bytes_of(0, rank) for rank in (0, 1))
    largest = max(chunk.num_bytes for chunk in plan.made.plans[0].plan.chunks)
    assert first.transfer - second.transfer == 4 * largest
    assert {"nccl": AHEAD + 1, "ipc": SLOTS} == BUFFERS


def test_activations_are_those_of_the_paper():
    """34 s b h bytes of a GPT's layer without its scores, less 2 for the masks of dropout; a rank has 1 / tp.

    Beside them a layer's gradients: of attention 12 h bytes a token, of the feed-forward layer 20 h.
    """
    hidden = 1024
    gpt = {
        "architectures": ["NemotronHForCausalLM"], "hidden_size": hidden, "num_hidden_layers": 2, "vocab_size": 512,
        "num_attention_heads": 8, "head_dim": 128, "intermediate_size": 4 * hidden, "hybrid_override_pattern": "*-",
    }  # fmt: skip
    config = bf16(Mesh(), tokens=100)
    plan = run_plan(config, gpt)
    assert 2 * sum(layer_elements(plan.layout, layer, 1)[0] for layer in range(2)) == (34 - 2) * hidden

    def activations(stage=0, **changes):
        return activation_bytes(plan.layout, replace(config, **changes), stage, 1)

    assert activations() == 100 * (32 + 20) * hidden
    assert activations(mesh=Mesh(tp=4)) == 25 * (32 + 20 + 4 * 4) * hidden  # input and its gradient, joined
    assert [activations(stage, mesh=Mesh(pp=2)) for stage in (0, 1)] == [
        100 * (2 * 12 + 12) * hidden,
        100 * 40 * hidden,
    ]
    assert activations(recompute="full") == 100 * (2 * 2 + 2 * 20) * hidden


def test_logits_and_their_gradient_are_in_the_type_of_the_weights():
    config = bf16(Mesh(), tokens=100, recompute="full")
    plan = run_plan(config, tiny_config("qwen3", "bfloat16") | {"vocab_size": 1 << 20})
    hidden, layers = (plan.layout.sizes[name] for name in ("hidden", "layers"))
    assert activation_bytes(plan.layout, config, 0, 1) == 100 * 2 * (2 * (1 << 20) + (layers + 3) * hidden)


def test_experts_of_the_busiest_rank_have_its_share_of_the_activations():
    plan = tiny(Mesh(ep=2, dp=2), recompute="full", tokens=100)
    even, busy = (activation_bytes(plan.layout, replace(plan.config, busiest=share), 0, 4) for share in (1, 3))
    sizes = plan.layout.sizes
    routed = 2 * (sizes["hidden"] + 3 * sizes["moe_ffn"]) + 2 * sizes["hidden"]
    assert busy - even == 100 * 4 * (3 - 1) * 4 * routed


def test_what_the_optimizer_has_on_the_host_is_not_on_the_gpu():
    """On the host a parameter, its gradient and two moments, all fp32; on the GPU neither master nor moments."""
    (whole, none) = (tiny(Mesh(), dtype="bfloat16", optimizer_offload=share).made for share in (1.0, 0.0))
    size = whole.holdings[0].count(expert=False) + whole.holdings[0].count(expert=True)
    assert [(made.memory[0].optimizer, made.memory[0].host) for made in (whole, none)] == [
        (0, 16 * size),
        (12 * size, 0),
    ]
    assert none.memory[0].total - whole.memory[0].total == 12 * size


def test_measured_bandwidths_are_those_of_the_recorded_run():
    rows = json.loads((ROOT / MEASURED_IN).read_text())["rows"]
    found = {
        row["transport"]: row["verified_gb_s"]
        for row in rows if row.get("tensors") == "experts" and "verified_gb_s" in row
    }  # fmt: skip
    assert found == MEASURED_GB_S


def test_time_of_a_sync_is_bytes_by_bandwidth(deepseek):
    assert deepseek.made.transfer_s == pytest.approx(1342.05e9 / 312.3e9, rel=1e-5)
    knobs = {"dtype": "bfloat16", "max_chunk_mib": 1024, "transfer_gb_s": 10.0, "gather_gb_s": 5.0}
    one, two = (tiny(mesh, **knobs) for mesh in (Mesh(), Mesh(pp=2)))
    assert one.made.transfer_s == two.made.transfer_s == one.num_bytes / 10e9
    assert one.made.gather_s == 0.0  # one rank holds everything
    least = min(two.made.bytes_of(index, 1).weights for index in range(2))
    assert two.made.gather_s == (two.num_bytes - least) / 5e9


CONTRADICTIONS = {
    "vocabulary": (
        ("deepseek-v3", Mesh(tp=3)),
        "tp = 3 does not divide the 129,280 vocabulary entries of DeepseekV3ForCausalLM: it would have to be padded to "
        "129,282, and the trainer does not pad",
    ),
    "experts": (("deepseek-v3", Mesh(ep=3, dp=3)), "ep = 3 does not divide the 256 experts of DeepseekV3ForCausalLM"),
    "width of an expert": (
        ("qwen3-235b-a22b", Mesh(etp=5, dp=5)),
        "etp = 5 does not divide the 1,536 columns of an expert of Qwen3MoeForCausalLM",
    ),
    "layers over pp": (
        ("deepseek-v3", Mesh(pp=16)),
        "61 layers do not divide over pp * vpp = 16 * 1 chunks: give --first-stage-layers or --last-stage-layers, or "
        "other sizes; --last-stage-layers 1 does",
    ),
    "layers over vpp": (
        ("qwen3-235b-a22b", Mesh(pp=2, vpp=3)),
        "94 layers do not divide over pp * vpp = 2 * 3 chunks: give --first-stage-layers or --last-stage-layers, or "
        "other sizes; --first-stage-layers 47 --last-stage-layers 47 does",
    ),
    "Llama 3.1 405B": (
        ("qwen3-8b", Mesh(pp=8, vpp=2)),
        "126 layers do not divide over pp * vpp = 8 * 2 chunks: give --first-stage-layers or --last-stage-layers, or "
        "other sizes; --first-stage-layers 15 --last-stage-layers 15 does",
    ),
    "ends of a pipeline": (
        ("deepseek-v3", Mesh(pp=16, first_stage_layers=3)),
        "58 layers are left for 15 pipeline stages after first 3 and last None of 61: they must divide evenly; "
        "--last-stage-layers 1 does",
    ),
    "virtual stages of a hybrid": (
        ("hybrid-108-layers", Mesh(pp=2, vpp=2)),
        "vpp = 2, but megatron-bridge builds NemotronHForCausalLM without virtual stages",
    ),
    "groups of a hybrid": (
        ("hybrid-108-layers", Mesh(tp=16)),
        "tp = 16 does not divide the 8 groups of the state-space layers of NemotronHForCausalLM",
    ),
}  # fmt: skip


UNEVEN = {
    "Llama 3.1 405B, embedding and head as layers": (
        126,
        Mesh(pp=8, vpp=2, first_stage_layers=15, last_stage_layers=15),
    ),
    "ends of other multiples": (16, Mesh(pp=3, vpp=2, first_stage_layers=4, last_stage_layers=2)),
    "embedding alone": (11, Mesh(pp=3, vpp=2, first_stage_layers=3)),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_stages_with_virtual_ones_hold_every_layer_once_in_order(case):
    layers, mesh = UNEVEN[case]
    order = [mesh.layers_of(stage, chunk, layers) for chunk in range(mesh.vpp) for stage in range(mesh.pp)]
    assert [layer for chunk in order for layer in chunk] == list(range(layers))
    sizes = [sum(len(mesh.layers_of(stage, chunk, layers)) for chunk in range(mesh.vpp)) for stage in range(mesh.pp)]
    assert sizes == mesh.stage_sizes(layers)


@pytest.mark.parametrize("ends", [(3, None), (2, 3), (5, 5)])
def test_uneven_stages_that_vpp_does_not_divide_are_a_contradiction(ends):
    sizes = tiny_config("qwen3", "float32") | {"num_hidden_layers": 16}
    mesh = Mesh(pp=4, vpp=2, first_stage_layers=ends[0], last_stage_layers=ends[1])
    (sentence,) = run_plan(bf16(mesh), sizes).contradictions[:1]
    assert "vpp must divide each stage, or an end must have one layer less" in sentence or "evenly" in sentence


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_size_that_does_not_divide_is_named(case):
    (name, mesh), sentence = CONTRADICTIONS[case]
    plan = run_plan(bf16(mesh), published(name, **({"num_hidden_layers": 126} if case.startswith("Llama") else {})))
    assert sentence in plan.contradictions
    assert plan.made is None


def test_every_contradiction_is_named_at_once():
    plan = run_plan(bf16(Mesh(tp=6, pp=5, ep=3, dp=3)), published("qwen3-235b-a22b"))
    assert [sentence.partition(" ")[0] for sentence in plan.contradictions] == ["tp", "tp", "tp", "ep", "94", "the"]
    assert plan.contradictions[1].endswith(
        " does not divide the 4 key-value heads of Qwen3MoeForCausalLM, and is no multiple of them"
    )
    assert plan.contradictions[-1] == "the greatest tp below 6 that divides this model is 4"


def test_ranks_that_do_not_fit_are_a_contradiction_without_their_activations():
    mesh = Mesh(pp=2, first_stage_layers=1)
    plan = tiny(mesh)
    small, large = sorted(plan.made.bytes_of(index, index).certain for index in range(2))
    between = (small + large) / 2 / GIB
    (sentence,) = tiny(mesh, gpu_gib=between).contradictions
    limit = f"{between:g}"
    assert sentence == f"1 of 2 ranks do not fit a GPU of {limit} GiB, activations apart: the largest needs 0.0 GiB"
    assert tiny(mesh, gpu_gib=between).made.above(between * GIB, lambda item: item.certain) == [1]
    roomy = 1.01 * large / GIB
    assert tiny(mesh, gpu_gib=roomy).contradictions == ()  # an estimate of activations contradicts nothing
    assert tiny(mesh, gpu_gib=roomy).made.above(roomy * GIB, lambda item: item.total) == [0, 1]


class Changed:
    """A layout whose placements a test changes."""

    def __init__(self, layout, change):
        self.layout, self.change = layout, change

    def placements(self, mesh, rank, chunk=0):
        found = []
        for place in self.layout.placements(mesh, rank, chunk):
            found += self.change(mesh.coordinate(rank), place)
        return found


def amiss(mesh, change, name="qwen3-moe"):
    """Contradictions of a tiny model whose layout was changed."""
    plan = tiny(mesh, name)
    assert plan.contradictions == ()
    made = plans.make(plan, holdings_of(Changed(plan.layout, change), mesh))
    return [*made.ownership.errors(plan.shapes), *plan_errors(made.plans, plan.shapes)]


ROUTER = "decoder.layers.1.mlp.router.weight"
UP = "decoder.layers.1.mlp.experts.linear_fc1.weight5"


def test_a_name_that_no_rank_owns():
    found = amiss(Mesh(tp=2), lambda at, place: [] if place.global_name == ROUTER else [place])
    assert found == ["no rank owns `model.layers.1.mlp.gate.weight`", "nobody sends `model.layers.1.mlp.gate.weight`"]


def test_a_name_that_the_checkpoint_does_not_have():
    def change(at, place: ParamPlacement):
        if place.global_name != ROUTER:
            return [place]
        boxes = tuple(replace(box, source="model.layers.9.mlp.gate.weight") for box in place.boxes)
        return [
            place,
            replace(place, global_name="more", group="more", boxes=boxes, source_shapes={boxes[0].source: (16, 96)}),
        ]

    assert amiss(Mesh(), change) == [
        "ranks hold `model.layers.9.mlp.gate.weight`, which the checkpoint does not have",
        "`model.layers.9.mlp.gate.weight` would be sent, which the checkpoint does not have",
    ]


def test_a_name_that_is_owned_twice():
    def change(at, place: ParamPlacement):
        again = replace(place, global_name="decoder.layers.1.again", param_name="again", group="again")
        return [place, again] if place.global_name == ROUTER else [place]

    assert amiss(Mesh(), change) == [
        "`model.layers.1.mlp.gate.weight`: overlap or empty box at index 0 (next box begins at 0)",
        "rank 0 cannot plan the transfer: `model.layers.1.mlp.gate.weight` stands twice in the chunk plan",
    ]


def test_copies_that_are_other_parts():
    def change(at, place: ParamPlacement):
        if place.global_name != ROUTER or at.tp == 0:
            return [place]
        return [replace(place, boxes=(replace(place.boxes[0], begin=8), replace(place.boxes[0], end=8)))]

    assert amiss(Mesh(tp=2), change) == [
        f"copies of {ROUTER} tp 0/1 are other parts on rank 0 and rank 1",
    ]


def test_a_tensor_with_a_hole():
    def change(at, place: ParamPlacement):
        held = at.tp == 1 and place.global_name.endswith("layers.0.self_attention.linear_proj.weight")
        return [] if held else [place]

    assert amiss(Mesh(tp=2), change) == [
        "`model.layers.0.self_attn.o_proj.weight`: boxes cover 128 of 256 indices",
        "rank 1 would have another chunk plan than rank 0: tensor 6 is `model.layers.0.input_layernorm.weight` where "
        "the others have `model.layers.0.self_attn.o_proj.weight`",
    ]


def test_ranks_whose_plans_differ():
    """An expert that one rank of its group numbers otherwise: the others export it in another place."""

    def change(at, place: ParamPlacement):
        return (
            [replace(place, global_name=f"{place.global_name}9")]
            if at.ep == 1 and "linear_fc2" in place.global_name
            else [place]
        )

    (sentence,) = amiss(Mesh(ep=2, dp=2), change)
    assert sentence.startswith("rank 1 would have another chunk plan than rank 0: tensor ")


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([0, 1, 2, 5, 7, 8], most=2) == "0-2, 5, ..."
