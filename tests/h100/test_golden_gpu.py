"""Load through Megatron-Bridge on GPUs, export, and find every tensor of the source bit by bit."""

from __future__ import annotations

import time

import pytest
import torch

from tests.dist.clean_case import compared, judge
from tests.h100.models import fixes, model
from verifier.config import GoldenConfig
from verifier.mesh import Mesh

FAMILIES = ("qwen3", "qwen3-tied", "llama", "qwen3-moe", "deepseek-v3", "nemotron-h")
NO_ROW = (("mistral", Mesh()), ("glm4_moe", Mesh(tp=2, ep=2)))
"""Families without a hand-written layout row, whose layout is derived on the GPUs first."""
WIDE = ("wide:qwen3-30b-a3b", "wide:deepseek-v3", "wide:nemotron-3-nano")
PP2_EP2 = Mesh(pp=2, ep=2, dp=2)
PP2_EP2_CP2 = Mesh(pp=2, ep=2, cp=2)
EP4 = Mesh(ep=4, dp=4)
ON_ONE = [*((name, Mesh()) for name in (*FAMILIES, *WIDE)), NO_ROW[0]]
ON_TWO = [*((name, Mesh(tp=2, ep=2)) for name in ("qwen3-moe", "deepseek-v3", "nemotron-h")), NO_ROW[1]]
ON_FOUR = [
    ("qwen3", Mesh(tp=2, pp=2)),
    ("qwen3-tied", Mesh(tp=2, pp=2)),
    *((name, mesh) for name in ("qwen3-moe", "deepseek-v3") for mesh in (EP4, PP2_EP2, PP2_EP2_CP2)),
    *(("nemotron-h", mesh) for mesh in (EP4, PP2_EP2, Mesh(tp=4), Mesh(pp=2, tp=2, ep=2))),
    *((name, mesh) for name in WIDE for mesh in (EP4, Mesh(tp=2, ep=2, dp=2))),
]
WIDE_GIB = 15.0
"""Memory that the export of a wide model takes, at most; 10.9 GiB on an H100."""
DASHES = str.maketrans(": ", "--")
CASES = [
    pytest.param(
        name, mesh, id=f"{name} {mesh.label()}".translate(DASHES),
        marks=pytest.mark.h100(gpus=gpus, least=1, **({"gib": WIDE_GIB} if name in WIDE else {})),
    )
    for gpus, cases in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR))
    for name, mesh in cases
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_export_equals_the_source(name, mesh, runner, measured, tmp_path):
    began = time.monotonic()
    config = GoldenConfig(
        model=model(name), trace=tmp_path / "trace", mesh=mesh, dtype="bfloat16", fixes=fixes(name)
    )  # fmt: skip
    trace = runner.golden(config)
    report = judge(trace)
    measured(
        family=name, mesh=mesh.label(), gpus=min(mesh.world_size, torch.cuda.device_count()),
        bitwise=compared(report, "WGT004"), seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
