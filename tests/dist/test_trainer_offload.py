"""A trainer's state goes to the host and comes back, three times: nothing is left, and no bit changes.

What this does not exercise: memory of a GPU (`tests/h100/test_train_gpu.py`).
"""

from __future__ import annotations

import pytest

from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny

pytestmark = pytest.mark.slow

OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture
def run(trainer_launcher, checkpoints, tmp_path):
    def run(model, dtype, mesh, data_parallel, *, offload):
        return trainer_launcher.run(
            "tests.dist.offload_functions:cycles", world_size=Mesh(**mesh).world_size, run_dir=tmp_path / str(offload),
            args={
                "checkpoint": str(write_tiny(model, checkpoints, dtype=dtype)), "mesh": mesh, "dtype": dtype,
                "tier": "cpu", "data_parallel": data_parallel, "offload": offload,
            },
            mesh=Mesh(**mesh),
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("model", "dtype", "mesh", "data_parallel"),
    [
        ("qwen3", "bfloat16", {"dp": 2}, OVERLAPPED),
        ("qwen3-tied", "float32", {"pp": 2}, OVERLAPPED),
        ("qwen3-moe", "float32", {"ep": 2, "dp": 2}, OVERLAPPED),
        ("qwen3", "bfloat16", {}, {}),
    ],
)
def test_state_comes_back_bitwise_three_times(run, model, dtype, mesh, data_parallel):
    stayed, went = (run(model, dtype, mesh, data_parallel, offload=offload) for offload in (False, True))
    for here, there in zip(stayed, went, strict=True):
        assert there["stepped"] == there["returned"] == here["stepped"]
        assert there["weights"] == here["weights"]
        assert there["left"] == [0, 0, 0]
        assert all(there["freed"])
