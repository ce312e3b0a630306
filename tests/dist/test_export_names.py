"""The layout oracle against Megatron itself: on every rank, the same names and the same bits.

The layout is written without Megatron-Bridge, the model is loaded by it; that they agree on every local tensor of every
rank says that neither is wrong alone.

What this does not exercise: names after a wrapper (DDP, LoRA), and the export (tests/dist/test_trainer_*.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verifier.launch.fork_launcher import ForkLauncher
from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny

HERE = Path(__file__).parent
DENSE = (
    Mesh(),
    Mesh(tp=2),
    Mesh(tp=4),
    Mesh(pp=2),
    Mesh(pp=2, vpp=2),
    Mesh(tp=2, pp=2),
    Mesh(pp=2, first_stage_layers=1),
    Mesh(pp=3, first_stage_layers=1, last_stage_layers=1),
    Mesh(pp=3, vpp=2, first_stage_layers=1, last_stage_layers=1),
    Mesh(cp=2, dp=2),
)
EXPERT = (
    Mesh(ep=2, dp=2),
    Mesh(tp=2, ep=2),
    Mesh(tp=2, etp=2),
    Mesh(tp=2, pp=2, ep=2),
    Mesh(tp=2, ep=2, etp=2, dp=2),
    Mesh(pp=2, vpp=2, ep=2, dp=2),
)
HYBRID = (
    Mesh(),
    Mesh(tp=2),
    Mesh(tp=4),
    Mesh(pp=2),
    Mesh(ep=2, dp=2),
    Mesh(tp=2, etp=2),
    Mesh(tp=2, pp=2, ep=2),
    Mesh(pp=2, first_stage_layers=3),
    Mesh(cp=2),
)
CASES = [
    *(("qwen3", mesh, "float32") for mesh in DENSE),
    *(("qwen3-tied", mesh, "float32") for mesh in (Mesh(), Mesh(pp=2, vpp=2), Mesh(tp=2, pp=2))),
    ("qwen3-tied", Mesh(tp=2), "bfloat16"),
    *(("qwen2", mesh, "float32") for mesh in (Mesh(tp=2, pp=2), Mesh(tp=4))),
    ("llama", Mesh(tp=2, pp=2), "float32"),
    *(("qwen3-moe", mesh, "float32") for mesh in EXPERT),
    *(("deepseek-v3", mesh, "float32") for mesh in (*EXPERT, Mesh(tp=4), Mesh(pp=2, first_stage_layers=1))),
    ("deepseek-v3", Mesh(tp=2), "bfloat16"),
    *(("nemotron-h", mesh, "float32") for mesh in HYBRID),
    ("nemotron-h", Mesh(tp=2), "bfloat16"),
]


@pytest.fixture(scope="module")
def launcher():
    sys.path.insert(0, str(HERE))
    with ForkLauncher(preload="export_functions:preload_cpu") as launcher:
        yield launcher
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.parametrize(("name", "mesh", "dtype"), CASES, ids=lambda value: getattr(value, "label", lambda: value)())
def test_every_rank_holds_what_the_layout_says(name, mesh, dtype, launcher, cache, tmp_path):
    path = write_tiny(name, cache, dtype)
    args = {"path": str(path), "mesh": mesh.to_dict(), "dtype": dtype}
    results = launcher.run(
        "export_functions:compare_with_layout",
        world_size=mesh.world_size,
        run_dir=tmp_path,
        args=args,
        deadline_s=120,
    )
    assert [result["wrong"] for result in results] == [[]] * mesh.world_size
    assert all(result["num_compared"] > 0 for result in results)
