"""The matrix of a gate by its axes, what is left out of it, and the order of its cells."""

from __future__ import annotations

import json

import pytest

from verifier.campaign.gate.matrix import SMOKE, estimate_s, matrix_of, ordered, ranks_of
from verifier.campaign.gate.run import planned
from verifier.config import GateConfig
from verifier.errors import UsageError
from verifier.faults.catalog import CATALOG
from verifier.model.architectures_hf import write_scaled
from verifier.model.tiny import write_tiny


def names(tier: str = "cpu", num_gpus: int = 0, **knobs) -> list[str]:
    return [cell.id for cell in matrix_of(GateConfig(**knobs), tier, num_gpus).cells]


def test_the_default_matrix_of_a_mixture():
    matrix = matrix_of(GateConfig(models=("tiny:qwen3-moe",)), "cpu", 0)
    assert [cell.id for cell in matrix.cells] == [
        "golden tiny:qwen3-moe fp32 1-rank",
        "golden tiny:qwen3-moe bf16 1-rank",
        "golden tiny:qwen3-moe fp32 tp2",
        "golden tiny:qwen3-moe fp32 pp2",
        "golden tiny:qwen3-moe fp32 ep2-dp2",
        "golden tiny:qwen3-moe fp32 tp2-pp2-ep2",
        "roundtrip tiny:qwen3-moe fp32 1-rank vllm",
        "roundtrip tiny:qwen3-moe fp32 1-rank vllm,tp=2",
        "roundtrip tiny:qwen3-moe bf16 1-rank vllm",
        "roundtrip tiny:qwen3-moe fp32 tp2 vllm",
        "roundtrip tiny:qwen3-moe fp32 ep2-dp2 vllm",
        "roundtrip tiny:qwen3-moe fp32 pp2 vllm",
        "roundtrip tiny:qwen3-moe fp32 cp2 vllm",
        "train grpo tiny:qwen3-moe fp32 ep2-dp2",
        *(f"faults {name}" for name in SMOKE),
    ]
    assert [item.what for item in matrix.left_out] == ["train sft tiny:qwen3-moe"]
    assert all("route replay" in cell.carries for cell in matrix.cells if cell.kind == "roundtrip")
    assert matrix.families == {"qwen3-moe"}


def test_a_model_with_a_tokenizer_trains_both_ways_and_a_dense_one_replays_no_routes():
    cells = matrix_of(GateConfig(models=("tiny:add",)), "cpu", 0).cells
    assert [cell.id for cell in cells if cell.kind == "train"] == [
        "train sft tiny:add fp32 1-rank", "train grpo tiny:add fp32 dp2",
    ]  # fmt: skip
    assert not any("route replay" in cell.carries for cell in cells)
    assert not any("ep2" in cell.mesh for cell in cells)


def test_a_mixture_without_a_row_trains_on_sampled_rollouts_and_replays_no_routes(tmp_path):
    model = str(write_scaled("olmoe", tmp_path))
    matrix = matrix_of(GateConfig(models=(model,), kinds=("train",)), "cpu", 0)
    assert matrix.left_out == []
    assert [(cell.algorithm, cell.engine) for cell in matrix.cells] == [("sft", ""), ("grpo", "vllm")]


def test_an_engine_that_cannot_run_here_is_left_out_with_its_reason():
    matrix = matrix_of(GateConfig(models=("tiny:deepseek-v3",), kinds=("roundtrip",)), "cpu", 0)
    assert {cell.engine for cell in matrix.cells} == {"hf"}
    assert [(item.what, item.reason) for item in matrix.left_out] == [
        (
            "tiny:deepseek-v3, engine vllm",
            "vLLM has no CPU kernels for multi-head latent attention; use --engine hf",
        )
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["TotallyNewForCausalLM"]}, "unknown family: megatron-bridge has no bridge for TotallyNewF"),
        ({"index_topk": 48}, "the CPU tier has no stand-in for sparse latent attention by an indexer"),
    ],
)
def test_a_model_that_no_trainer_can_be_built_of_is_left_out(tmp_path, changes, reason):
    model = write_tiny("qwen3", tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    matrix = matrix_of(GateConfig(models=(str(model),), kinds=("golden", "roundtrip", "train")), "cpu", 0)
    assert not matrix.cells
    assert [item.what for item in matrix.left_out] == [str(model)]
    assert matrix.left_out[0].reason.startswith(reason)


def test_a_dtype_that_is_not_the_checkpoints_and_float32_on_gpus_are_left_out(tmp_path):
    model = str(write_tiny("qwen3", tmp_path))
    config = GateConfig(models=(model,), kinds=("golden",), meshes=("tp=1",), dtypes=("fp32", "bf16"))
    matrix = matrix_of(config, "cpu", 0)
    assert [cell.dtype for cell in matrix.cells] == ["float32"]
    assert "is stored in float32 and the run is in bfloat16" in matrix.left_out[0].reason
    matrix = matrix_of(GateConfig(models=(model,), kinds=("roundtrip",)), "cuda", 1)
    assert not matrix.cells
    assert "use --dtype bf16" in matrix.left_out[0].reason


def test_named_axes_meet_each_other_and_what_does_not_divide_is_left_out():
    matrix = matrix_of(
        GateConfig(models=("tiny:qwen3",), kinds=("golden",), meshes=("tp=2", "tp=3", "pp=2"), dtypes=("fp32", "bf16")),
        "cpu", 0,
    )  # fmt: skip
    assert [cell.id for cell in matrix.cells] == [
        f"golden tiny:qwen3 {dtype} {mesh}" for mesh in ("tp2", "pp2") for dtype in ("fp32", "bf16")
    ]
    assert [(item.what, item.reason) for item in matrix.left_out] == [
        ("tiny:qwen3, mesh tp3", "tp = 3 does not divide the 8 attention heads of Qwen3ForCausalLM")
    ]


def test_gpus_that_a_cell_takes():
    def places(*transports: str) -> dict[str, int]:
        config = GateConfig(models=("tiny:qwen3",), kinds=("roundtrip",), meshes=("tp=1", "tp=2"),
                            engines=("vllm",), transports=transports)  # fmt: skip
        return {cell.id: cell.num_gpus for cell in matrix_of(config, "cuda", 2).cells}

    assert places() == {"roundtrip tiny:qwen3 bf16 1-rank vllm": 1, "roundtrip tiny:qwen3 bf16 tp2 vllm": 2}
    assert places("nccl") == {"roundtrip tiny:qwen3 bf16 1-rank vllm nccl": 2}


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"engines": ("sglang",)}, "engine.kind is `sglang`"),
        ({"engines": ("vllm,cp=2",)}, "there is no knob `engine.cp`"),
        ({"engines": ("vllm,2",)}, "--engine is `vllm,2`, it must be a kind and options, such as vllm,tp=2"),
        ({"meshes": ("tp2",)}, "--mesh is `tp2`"),
        ({"faults": ("absent",)}, "there is no fault `absent`"),
        ({"meshes": ("tp=3",), "kinds": ("golden",)}, "the gate has no cell; the first that is left out: tiny:qwen3,"),
    ],
)
def test_what_nobody_knows_is_refused(knobs, said):
    with pytest.raises(UsageError) as refused:
        planned(GateConfig(models=("tiny:qwen3",), **knobs), "cpu", 0)
    assert str(refused.value).startswith(said)


def test_the_smoke_has_different_stages_and_one_config():
    faults = [CATALOG[name] for name in SMOKE]
    assert len({fault.stage for fault in faults}) == len(faults)
    assert len({(fault.model, fault.mesh, fault.engine, fault.dtype, fault.cycles) for fault in faults}) == 1


def test_the_cheap_ones_and_one_of_each_kind_and_axis_come_first():
    cells = matrix_of(GateConfig(models=("tiny:qwen3-moe",)), "cpu", 0).cells
    found = ordered(cells)
    assert sorted(cell.id for cell in found) == sorted(cell.id for cell in cells)
    assert found[0].id == "golden tiny:qwen3-moe fp32 1-rank"
    first_seven = found[:7]
    assert {cell.kind for cell in first_seven} == {"golden", "roundtrip", "train", "faults"}
    assert {axis for cell in first_seven for axis in cell.mesh.split()} >= {"tp2", "pp2", "ep2"}


def test_another_engine_costs_its_start():
    cell = next(item for item in matrix_of(GateConfig(models=("tiny:qwen3",)), "cpu", 0).cells if item.engine == "vllm")
    assert estimate_s(cell, "hf") == estimate_s(cell, "vllm") + 20


@pytest.mark.parametrize(("mesh", "ranks"), [("1 rank", 1), ("tp2 pp2 ep2", 4), ("ep2 dp2", 2), ("pp2 vpp2", 2)])
def test_ranks_of_a_label(mesh, ranks):
    assert ranks_of(mesh) == ranks
