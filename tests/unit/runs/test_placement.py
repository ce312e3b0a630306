"""Where trainer and engine go on a host of so many GPUs; no GPU is needed to know.

What this does not exercise: processes on GPUs; tests/h100 does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verifier.config import EngineOptions, GoldenConfig, RoundtripConfig
from verifier.config.sampling import SamplingOptions
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.runs.spec import Placement, place

TP2, TP4, PP2, HF = EngineOptions(tp=2), EngineOptions(tp=4), EngineOptions(pp=2), EngineOptions(kind="hf")
TP2_OF_PP2 = EngineOptions(tp=2, pp=2)
TP2_PP2 = Mesh(tp=2, pp=2)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    def have(gpus: int, visible: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


def asked(mesh: Mesh = TP2_PP2, **options: object) -> RoundtripConfig:
    return RoundtripConfig(model="tiny:qwen3", trace=Path("trace"), mesh=mesh, dtype="bfloat16", **options)


def trained(replicas: int, mesh: Mesh, tp: int = 1, **options: object) -> TrainConfig:
    return TrainConfig(
        model="tiny:add", run=Path("run"), algorithm="grpo", mesh=mesh, dtype="bfloat16",
        engine=SamplingOptions(replicas=replicas, tp=tp), **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "config", "expected"),
    [
        (8, asked(engine=TP2), Placement(transport="nccl", trainer_gpus=4, engine_gpus=("4,5",))),
        (4, asked(engine=TP2), Placement(transport="ipc", trainer_gpus=4, engine_gpus=("0,1",))),
        (2, asked(engine=TP2), Placement(transport="ipc", trainer_gpus=2, engine_gpus=("0,1",))),
        (1, asked(), Placement(transport="ipc", trainer_gpus=1, engine_gpus=("0",))),
        (3, asked(transport="nccl"), Placement(transport="nccl", trainer_gpus=2, engine_gpus=("2",))),
        (2, asked(transport="nccl"), Placement(transport="nccl", trainer_gpus=1, engine_gpus=("1",))),
        (8, asked(Mesh(), transport="ipc"), Placement(transport="ipc", trainer_gpus=1, engine_gpus=("0",))),
        (8, asked(engine=PP2), Placement(transport="nccl", trainer_gpus=4, engine_gpus=("4,5",))),
        (4, asked(engine=TP2_OF_PP2), Placement(transport="ipc", trainer_gpus=4, engine_gpus=("0,1,2,3",))),
        (2, asked(engine=HF), Placement(transport="gloo", trainer_gpus=2)),
        (4, trained(2, Mesh(dp=2)), Placement(transport="nccl", trainer_gpus=2, engine_gpus=("2", "3"))),
        (4, trained(4, Mesh(dp=4)), Placement(transport="ipc", trainer_gpus=4, engine_gpus=("0", "1", "2", "3"))),
        (8, trained(2, Mesh(dp=4), tp=2), Placement(transport="nccl", trainer_gpus=4, engine_gpus=("4,5", "6,7"))),
    ],
    ids=str,
)
def test_gpus_are_shared_where_there_are_too_few(host, gpus, config, expected):
    host(gpus)
    assert place(config, "cuda") == expected


def test_the_engine_is_given_the_names_of_visible_gpus(host):
    host(3, "7, 5,3")
    assert place(asked(transport="nccl"), "cuda").engine_gpus == ("3",)


@pytest.mark.parametrize(
    ("gpus", "config", "said"),
    [
        (2, asked(engine=TP2, transport="nccl"), "needs 2 GPUs for the engine and one or more for the trainer"),
        (2, asked(engine=TP4), "engine.tp 4 takes 4 GPUs, and the trainer has 2: make it smaller"),
        (8, asked(Mesh(), engine=TP2, transport="ipc"), "engine.tp 2 takes 2 GPUs, and the trainer has 1"),
        (2, trained(2, Mesh(), transport="nccl"), "needs 2 GPUs for the engines and one or more for the trainer"),
        (4, trained(3, Mesh(dp=2), transport="ipc"), "engine.replicas 3 takes 3 GPUs, and the trainer has 2"),
        (8, asked(engine=HF, transport="nccl"), "--engine hf runs on the CPU, and --transport is nccl: leave it out"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(host, gpus, config, said):
    host(gpus)
    with pytest.raises(UsageError, match=said):
        place(config, "cuda")


def test_ranks_of_other_hosts_take_no_gpu_here(host):
    host(4)
    assert place(trained(2, Mesh(dp=4)), "cuda", ranks=2) == place(trained(2, Mesh(dp=2)), "cuda")


def test_the_cpu_tier_takes_no_gpu(host):
    host(8)
    assert place(asked(), "cpu") == Placement(transport="gloo")
    golden = GoldenConfig(model="tiny:qwen3", trace=Path("trace"), mesh=TP2_PP2)
    assert [place(golden, tier).trainer_gpus for tier in ("cpu", "cuda")] == [0, 4]


def test_without_a_driver_the_tier_is_known_without_torch():
    code = "import sys, verifier.platform as p; p._DRIVER = 'none'; print(p.select(), *sys.modules)"
    tier, *loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split()
    assert tier == b"cpu"
    assert b"torch" not in loaded
