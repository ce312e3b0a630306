"""Train, sync a vLLM engine on GPUs three times by NCCL or CUDA IPC, and judge every hand-over."""

from __future__ import annotations

import time

import pytest

from tests.dist.clean_case import judge
from tests.h100.models import fixes, model
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.mesh import Mesh
from verifier.stages.logprob.records import DtypeNoise, OracleLogprobs, TrainerLogprobs
from verifier.stages.rollout.records import EngineLogprobs

CYCLES = 3
SLOW = ("wide:qwen3-30b-a3b", "wide:deepseek-v3", "wide:nemotron-3-nano", "nemotron-h")
"""Many bytes, and many kernels to compile."""
WIDE_GIB = {
    ("wide:qwen3-30b-a3b", 1): 55.0,
    ("wide:deepseek-v3", 4): 62.0,
    ("wide:nemotron-3-nano", 4): 44.0,
    ("wide:qwen3-30b-a3b", 4): 33.0,
}
"""Wide model and ranks -> memory that it takes at most on a GPU. On H100s one rank took 52.6 GiB. Of DeepSeek-V3 on
four, a trainer's rank took 44.4 GiB when its send buffers were allocated, and an engine's rank up to 16.4. The last two
were seen beside others: some 40 and less than 33 GiB."""
TINY_GIB = 10.0
"""Memory on a GPU of the others: a rank or two, an engine's rank and their groups; 9.6 GiB at most on two H100s."""
TP2_PP2 = Mesh(tp=2, pp=2)
CASES = [
    pytest.param(
        name, mesh, transport, engine_tp,
        id=f"{name.replace(':', '-')}-{mesh.label().replace(' ', '-')}-{transport}-engine-tp{engine_tp}",
        marks=[
            pytest.mark.h100(
                gpus=mesh.world_size + (engine_tp if transport == "nccl" else 0),
                least=engine_tp + (transport == "nccl"),
                gib=WIDE_GIB.get((name, mesh.world_size), TINY_GIB),
            ),
            *([pytest.mark.own_process] if name in SLOW or mesh.world_size > (2 if name == "qwen3" else 1) else []),
        ],
    )
    for name, mesh, transport, engine_tp in (
        ("qwen3", Mesh(), "ipc", 1),
        ("qwen3-moe", Mesh(), "ipc", 1),
        ("deepseek-v3", Mesh(), "ipc", 1),
        ("nemotron-h", Mesh(), "ipc", 1),
        ("mistral", Mesh(), "ipc", 1),
        ("wide:qwen3-30b-a3b", Mesh(), "ipc", 1),
        ("qwen3", Mesh(), "nccl", 1),
        ("qwen3-moe", Mesh(tp=2, ep=2), "ipc", 2),
        ("deepseek-v3", Mesh(pp=2), "ipc", 2),
        ("deepseek-v3", Mesh(cp=2), "ipc", 1),
        ("nemotron-h", Mesh(tp=2, ep=2), "ipc", 2),
        ("qwen3", Mesh(tp=2), "nccl", 2),
        ("qwen3-moe", Mesh(tp=2, ep=2), "nccl", 2),
        ("nemotron-h", Mesh(tp=2, ep=2), "nccl", 2),
        ("qwen3-moe", Mesh(tp=2, ep=2), "nccl", 1),
        ("nemotron-h", Mesh(tp=2, ep=2), "nccl", 1),
        ("qwen3", TP2_PP2, "ipc", 4),
        ("qwen3-moe", Mesh(pp=2, ep=2, cp=2), "ipc", 2),
        ("deepseek-v3", Mesh(pp=2, ep=2, dp=2), "ipc", 2),
        ("qwen3", Mesh(tp=4), "ipc", 4),
        ("qwen3", Mesh(pp=4), "ipc", 4),
        ("qwen3-moe", Mesh(tp=2, dp=2, ep=4), "ipc", 4),
        ("qwen3-moe", Mesh(tp=2, pp=2, ep=2), "ipc", 4),
        ("deepseek-v3", Mesh(cp=4), "ipc", 4),
        ("deepseek-v3", Mesh(tp=2, dp=2, ep=4), "ipc", 4),
        ("nemotron-h", Mesh(tp=2, dp=2, ep=4), "ipc", 4),
        ("wide:qwen3-30b-a3b", Mesh(tp=2, dp=2, ep=4), "ipc", 4),
        ("wide:deepseek-v3", Mesh(tp=4, ep=4), "ipc", 4),
        ("wide:nemotron-3-nano", Mesh(tp=2, dp=2, ep=4), "ipc", 4),
        ("qwen3", Mesh(tp=4), "nccl", 4),
        ("qwen3-moe", Mesh(dp=4, ep=4), "nccl", 4),
        ("deepseek-v3", Mesh(pp=4), "nccl", 4),
    )
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "transport", "engine_tp"), CASES)
def test_synced_engine_is_the_cold_engine(name, mesh, transport, engine_tp, runner, measured, tmp_path):
    began = time.monotonic()
    trace = runner.roundtrip(
        RoundtripConfig(
            model=model(name), trace=tmp_path / "trace", mesh=mesh, dtype="bfloat16",
            engine=EngineOptions(tp=engine_tp), cycles=1 if name.startswith("wide:") else CYCLES, transport=transport,
            fixes=fixes(name),
        )
    )  # fmt: skip
    took = time.monotonic() - began
    found = store.read(trace)
    noise = list(found.of(DtypeNoise, name="scored"))
    measured(
        family=name, mesh=mesh.label(), transport=transport, engine_tp=engine_tp, seconds=round(took, 1),
        noise_mean=max(float(item.mean) for item in noise), noise_max=max(float(item.greatest) for item in noise),
        trainer=distance(found, TrainerLogprobs, OracleLogprobs),
        engine=distance(found, EngineLogprobs, OracleLogprobs),
        mismatch=distance(found, EngineLogprobs, TrainerLogprobs),
    )  # fmt: skip
    judge(trace)


def distance(trace, actual, expected):
    """(greatest mean, greatest value) of the absolute differences on what both score, over all versions, nats."""
    theirs = {item.version: trace.array(item).astype(float) for item in trace.of(expected, name="scored")}
    gaps = [abs(trace.array(item).astype(float) - theirs[item.version]) for item in trace.of(actual, name="scored")]
    return max(float(gap.mean()) for gap in gaps), max(float(gap.max()) for gap in gaps)
