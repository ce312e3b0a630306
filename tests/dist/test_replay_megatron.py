"""Router replay on real Megatron ranks: made-up routes are obeyed to the last token, natural ones change no bit."""

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.trainer_functions import rollouts
from verifier.core import store
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest, MeshSizes
from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny
from verifier.stages.replay.records import OWN_ROUTES, GivenRoutes, NaturalRouteLogprobs, UsedRoutes

CASES = [
    ("qwen3-moe", {}, "float32"),
    ("qwen3-moe", {"cp": 2, "ep": 2}, "float32"),
    ("qwen3-moe", {"tp": 2, "ep": 2}, "bfloat16"),
    ("qwen3-moe", {"pp": 2, "vpp": 2, "dp": 2}, "float32"),
    ("qwen3-moe", {"tp": 2, "cp": 2, "etp": 2}, "float32"),
    ("deepseek-v3", {}, "float32"),
    ("deepseek-v3", {"pp": 2, "first_stage_layers": 1}, "float32"),
    ("deepseek-v3", {"pp": 2, "ep": 2, "dp": 2}, "bfloat16"),
    ("nemotron-h", {"tp": 2, "ep": 2}, "bfloat16"),
]
LAYERS = {"qwen3-moe": {0, 1, 2, 3}, "deepseek-v3": {1, 2, 3}, "nemotron-h": {1, 6}}
"""Layers with routers."""


@pytest.mark.parametrize(("model", "sizes", "dtype"), CASES)
def test_routes_are_obeyed_and_natural_ones_change_nothing(
    model, sizes, dtype, trainer_launcher, checkpoints, tmp_path
):
    mesh = Mesh(**sizes)
    trace = store.create(tmp_path / "trace", Manifest(mesh=MeshSizes(**mesh.to_dict()), dtype=dtype))
    results = trainer_launcher.run(
        "replay_functions:replay",
        world_size=mesh.world_size,
        run_dir=tmp_path / "ranks",
        args={
            "checkpoint": str(write_tiny(model, checkpoints, dtype=dtype)),
            "mesh": sizes,
            "dtype": dtype,
            "trace": str(trace),
        },
        mesh=mesh,
    )
    assert all(result["idle"] for result in results)
    # Padding, too: on GPUs the bits of a token depend on the rows beside it.
    assert all(result["alike"] for result in results)
    assert {layer for result in results for layer in result["layers"]} == LAYERS[model]
    seen = store.read(trace)
    for code in ("RPL001", "RPL002"):
        outcome = run_check(REGISTRY[code], seen)
        assert outcome.verdict is Verdict.HOLDS, outcome.finding and outcome.finding.first
    routes = seen.array(next(seen.of(GivenRoutes)))
    lengths = next(seen.of(NaturalRouteLogprobs)).lengths
    # Each token but a rollout's last, in each layer; and no router chooses so by itself.
    assert len(routes) == sum(lengths) * len(LAYERS[model])
    assert len(np.unique(np.sort(routes[:, 3:], axis=-1), axis=0)) > len(routes) / 3


@pytest.mark.parametrize(
    ("model", "sizes", "dtype"),
    [
        ("qwen3-moe", {"tp": 2, "ep": 2}, "bfloat16"),
        ("qwen3-moe", {"pp": 2, "cp": 2}, "bfloat16"),
        ("nemotron-h", {}, "bfloat16"),
        ("qwen3-moe", {"ep": 2, "dp": 2}, "float32"),
    ],
)
def test_the_routers_own_choice_in_an_update_is_recorded_in_less_than_float32(
    model, sizes, dtype, trainer_launcher, checkpoints, tmp_path
):
    mesh = Mesh(**sizes)
    trace = store.create(tmp_path / "trace", Manifest(mesh=MeshSizes(**mesh.to_dict()), dtype=dtype))
    trainer_launcher.run(
        "replay_functions:update",
        world_size=mesh.world_size,
        run_dir=tmp_path / "ranks",
        args={
            "checkpoint": str(write_tiny(model, checkpoints, dtype=dtype)),
            "mesh": sizes,
            "dtype": dtype,
            "trace": str(trace),
        },
        mesh=mesh,
    )
    seen = store.read(trace)
    assert {item.name for item in seen.of(UsedRoutes)} == ({OWN_ROUTES} if dtype != "float32" else set())
    if dtype == "float32":
        return
    parts = [[seen.array(item) for item in seen.of(UsedRoutes, version=version)] for version in (0, 1)]
    assert len(parts[0]) == len(parts[1]) == mesh.world_size
    once, again = (np.unique(np.concatenate(part), axis=0) for part in parts)
    # Every token in each layer, whether its router runs once or twice, and the same experts.
    num_tokens = sum(len(rollout) for rollout in rollouts())
    assert len(np.unique(once[:, :3], axis=0)) == len(once) == num_tokens * len(LAYERS[model])
    assert once.tolist() == again.tolist()
    assert once[:, 3:].min() >= 0
    assert (np.diff(once[:, 3:], axis=-1) > 0).all()
