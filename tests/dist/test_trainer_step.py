"""What a step may and may not do, what an export must wait for, and the silent upstream traps."""

from __future__ import annotations

import json
import shutil

import pytest

from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.plan.digest import digest_tensor
from verifier.platform.upstream_fixes import MEGATRON_DECAY, MEGATRON_INDEX

OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture
def run(trainer_launcher, checkpoints, tmp_path):
    def run(function, model="qwen3", dtype="float32", mesh=None, **args):
        path = write_tiny(model, checkpoints, dtype=dtype)
        sizes = mesh or {}
        return trainer_launcher.run(
            f"trainer_functions:{function}",
            world_size=Mesh(**sizes).world_size,
            run_dir=tmp_path,
            args={"checkpoint": str(path), "mesh": sizes, "dtype": dtype, **args},
            mesh=Mesh(**sizes),
        )

    return run


@pytest.mark.parametrize(
    ("model", "dtype", "mesh"),
    [
        ("qwen3", "float32", {"tp": 2, "dp": 2}),
        ("qwen3", "bfloat16", {"pp": 2, "dp": 2}),
        ("deepseek-v3", "bfloat16", {"ep": 2, "dp": 2}),
    ],
)
def test_a_step_of_learning_rate_zero_moves_nothing(run, model, dtype, mesh):
    for result in run("idle", model=model, dtype=dtype, mesh=mesh, data_parallel=OVERLAPPED):
        assert result["after"] == result["before"]


@pytest.mark.parametrize("model", ["qwen3", "deepseek-v3"])
def test_bfloat16_leaves_as_it_came_and_float32_router_biases_too(run, checkpoints, model):
    source = open_checkpoint(write_tiny(model, checkpoints, dtype="bfloat16"))
    held = {name: source.read(name) for name in source.names()}
    expected = {name: f"{row.dtype} {list(row.shape)} {digest_tensor(row)}" for name, row in held.items()}
    for result in run("idle", model=model, dtype="bfloat16", mesh={"tp": 2}):
        assert result["before"] == expected


def test_a_family_without_a_bridge(run, trainer_launcher, checkpoints, tmp_path):
    path = tmp_path / "unknown"
    shutil.copytree(write_tiny("qwen3", checkpoints), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    args = {"checkpoint": str(path)}
    with pytest.raises(UsageError) as refusal:
        trainer_launcher.run("trainer_functions:idle", world_size=1, run_dir=tmp_path / "run", args=args)
    assert str(refusal.value) == (
        f"unknown family: megatron-bridge has no bridge for FooForCausalLM, which {path} holds"
    )


def test_export_waits_for_parameters_that_are_still_to_be_gathered(run):
    for result in run("stale", mesh={"dp": 2}, data_parallel=OVERLAPPED):
        assert result["synced"] == result["settled"]
        assert all(result["synced"][name] != digest for name, digest in result["before"].items())
        # The trap itself: without waiting, some tensors leave as they were before the step.
        assert result["naive"] != result["synced"]


@pytest.mark.slow
def test_interleaved_stages_without_overlapped_transfer_train_wrongly(run):
    right = run("steps_of_equal_lengths", mesh={"pp": 2, "vpp": 2})[0]
    plain = run("steps_of_equal_lengths", mesh={"pp": 2})[0]
    assert all(step == pytest.approx(wanted, rel=2e-5) for step, wanted in zip(right, plain, strict=True))
    overrides = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    wrong = run("steps_of_equal_lengths", mesh={"pp": 2, "vpp": 2}, overrides=overrides)[0]
    # The trap itself: no error, a loss that still looks like one, and a gradient norm several times too large.
    assert wrong[0][0] == pytest.approx(right[0][0], rel=0.1)
    assert wrong[0][1] > 2 * right[0][1]


def test_meshes_one_after_another_in_one_process(run):
    meshes = [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2}]
    first, second, third, again = run("rebuilt", mesh={"dp": 2}, meshes=meshes)[0]
    assert first == again
    assert second == third


@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "cp": 2}])
def test_a_neighbour_in_the_pack_moves_no_bit_of_mine(run, model, mesh):
    calm = run("score_only", model=model, mesh=mesh)[0]
    moved = run("score_only", model=model, mesh=mesh, perturb=1)[0]
    assert moved[1] != calm[1]
    assert [moved[at] for at in (0, 2, 3)] == [calm[at] for at in (0, 2, 3)]


@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_padding_of_nan_changes_nothing(run, model):
    mesh = {"tp": 2, "cp": 2}
    assert run("score_only", model=model, mesh=mesh, poison_padding=True) == run("score_only", model=model, mesh=mesh)


@pytest.mark.parametrize(
    ("model", "dtype", "mesh"),
    [
        ("qwen3-moe", "float32", {"ep": 2, "dp": 2}),
        pytest.param("nemotron-h", "bfloat16", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_steps_that_go_on_from_files_are_those_of_a_run_that_was_not_stopped(run, model, dtype, mesh):
    fixes = (MEGATRON_DECAY, MEGATRON_INDEX)
    first, second = (
        run("stepped", model=model, dtype=dtype, mesh=mesh, data_parallel=OVERLAPPED, resume=resume, fixes=fixes)
        for resume in (False, True)
    )
    assert first == second


@pytest.mark.parametrize("model", ["qwen3", "deepseek-v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_a_rank_without_replicas_are_saved_as_they_are_and_not_copied(run, model, dtype):
    for result in run("states_of_a_save", model=model, dtype=dtype, mesh={"pp": 2}, data_parallel=OVERLAPPED):
        (states, copied), (gathered, copied_by_megatron) = result["in place"], result["gathered"]
        assert states == gathered
        assert states
        assert copied == 0
        assert copied_by_megatron > 0
