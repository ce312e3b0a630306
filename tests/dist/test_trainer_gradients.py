"""Per-parameter gradients: against transformers in float64, across meshes, and across micro-batch splits.

A gradient norm or a loss curve does not show a missing reduction of one small tensor; its own gradient does.
"""

from __future__ import annotations

from functools import cache

import pytest
from safetensors.torch import load_file

from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny

RTOL_OF_LARGEST = 1e-5
"""Greatest difference over greatest gradient of the tensor; 2.7e-6 was measured over all cases here, in float32."""


@pytest.fixture(scope="module")
def run(trainer_launcher, checkpoints, tmp_path_factory):
    def run(function, model, mesh=None, **args):
        sizes = mesh or {}
        run_dir = tmp_path_factory.mktemp("gradients")
        file = run_dir / "gradients.safetensors"
        trainer_launcher.run(
            f"trainer_functions:{function}",
            world_size=Mesh(**sizes).world_size,
            run_dir=run_dir,
            args={"checkpoint": str(write_tiny(model, checkpoints)), "mesh": sizes, "file": str(file), **args},
            mesh=Mesh(**sizes),
        )
        return load_file(file)

    return run


@pytest.fixture(scope="module")
def one_rank(run):
    """Gradients of a model on one rank, computed once."""
    return cache(lambda model: run("gradients", model))


def differences(actual, expected):
    assert actual.keys() == expected.keys()
    return {
        name: float((actual[name].double() - wanted.double()).abs().max() / wanted.double().abs().max())
        for name, wanted in expected.items()
    }


@pytest.mark.parametrize("model", ["qwen3", "qwen3-tied", "llama"])
def test_gradients_agree_with_transformers(run, one_rank, model):
    expected = run("oracle_gradients", model)
    measured = differences(one_rank(model), expected)
    assert max(measured.values()) < RTOL_OF_LARGEST, max(measured.items(), key=lambda item: item[1])


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("qwen3-tied", {"pp": 2}),
        ("qwen3", {"tp": 2, "pp": 2}),
        ("qwen3", {"cp": 2, "dp": 2}),
        ("qwen3-moe", {"tp": 2, "etp": 2}),
        ("deepseek-v3", {"tp": 2, "cp": 2, "ep": 2}),
    ],
)
def test_gradients_agree_with_one_rank(run, one_rank, model, mesh):
    """Meshes that test_tokens_megatron.py, which compares every gradient too, does not have."""
    measured = differences(run("gradients", model, mesh=mesh), one_rank(model))
    assert max(measured.values()) < RTOL_OF_LARGEST, max(measured.items(), key=lambda item: item[1])


@pytest.mark.parametrize("model", ["qwen3", "deepseek-v3"])
def test_gradients_do_not_depend_on_the_micro_batch_split(run, model):
    expected = run("gradients", model, micro_batch_size=8)
    for size in (1, 3):
        measured = differences(run("gradients", model, micro_batch_size=size), expected)
        assert max(measured.values()) < RTOL_OF_LARGEST, max(measured.items(), key=lambda item: item[1])
