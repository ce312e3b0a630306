"""Architectures whose parts only they have: sinks and expert biases, scores bent to a bound, norms over all heads.

Log-probabilities of packed sequences against transformers, the export bitwise, and training steps over expert
parallelism against one rank. Upstream's bugs (docs/upstream.md) are fixed, or not met.

What this does not exercise: gradients of MiniMax-M2 and of GPT-OSS over tensor parallelism (docs/upstream.md).
"""

from __future__ import annotations

import json
import math
import shutil

import pytest

from verifier.mesh import Mesh
from verifier.model.architectures_hf import write_scaled
from verifier.model.checkpoint import open_checkpoint
from verifier.plan.digest import digest_tensor
from verifier.platform.upstream_fixes import BRIDGE_POST_NORM

LOGPROB_NATS = 1e-5
"""As in test_trainer_parity.py."""


def checkpoint_of(name, folder):
    """Tiny checkpoint; GPT-OSS has the numbers of YaRN that the bridge takes whatever the config says."""
    path = write_scaled(name, folder)
    if name != "gpt_oss":
        return path
    changed = folder / "published-yarn"
    shutil.copytree(path, changed, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = config["initial_context_length"] = 4096
    (changed / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    return changed


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        pytest.param(
            "gpt_oss", ({}, {"ep": 2, "dp": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"cp": 2}), marks=pytest.mark.slow
        ),
        ("gemma2", ({"tp": 2},)),
        ("gemma3", ({},)),
        pytest.param("minimax_m2", ({"tp": 2},), marks=pytest.mark.slow),
    ],
)
def test_trainer_agrees_with_the_checkpoint_and_with_transformers(
    name, meshes, trainer_launcher, checkpoints, tmp_path
):
    path = checkpoint_of(name, checkpoints)
    args = {"checkpoint": str(path), "fixes": [BRIDGE_POST_NORM]}
    (expected,) = trainer_launcher.run("trainer_functions:oracle", world_size=1, run_dir=tmp_path, args=args)
    source = open_checkpoint(path)
    held = {tensor: source.read(tensor) for tensor in source.names()}
    stored = {tensor: f"{row.dtype} {list(row.shape)} {digest_tensor(row)}" for tensor, row in held.items()}
    steps = {}
    for at, sizes in enumerate(meshes):
        mesh, folder = Mesh(**sizes), tmp_path / str(at)
        folder.mkdir()
        results = trainer_launcher.run(
            "trainer_functions:trainer", world_size=mesh.world_size, run_dir=folder,
            args={**args, "mesh": sizes}, mesh=mesh,
        )  # fmt: skip
        assert all(result["exported"] == stored for result in results)
        pairs = [pair for rows in zip(results[0]["scored"], expected, strict=True) for pair in zip(*rows, strict=True)]
        assert all(map(math.isfinite, (value for pair in pairs for value in pair)))
        assert max(abs(actual - wanted) for actual, wanted in pairs) < LOGPROB_NATS
        steps[mesh.label()] = results[0]["steps"]
    if name == "gpt_oss":
        assert steps[Mesh(ep=2, dp=2).label()][0] == pytest.approx(steps[Mesh().label()][0], rel=2e-6)
