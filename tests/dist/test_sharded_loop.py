"""The FSDP2 loop of docs/examples in two processes: it holds, as its variants do, and its bugs are caught.

What this does not exercise: GPUs, tensor parallelism by DTensors, vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, render_text, report_of

EXAMPLES = ROOT / "docs" / "examples"
LOOP = (EXAMPLES / "grpo_fsdp.py").read_text()
Edits = tuple[tuple[str, str], ...]
SHARD = "    for layer in model.model.layers:\n        fully_shard(layer)\n    fully_shard(model)\n"
REPORT = "loss=total, num_tokens=sum(map(len, responses))"
BACKWARD = "                loss.backward()\n                total += loss.item()\n"
REDUCED = (
    BACKWARD,
    f"{BACKWARD}            for value in model.parameters():\n                dist.all_reduce(value.grad)\n",
)
WHOLE = ("value.detach().full_tensor()", "value.detach()")
CLIP = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)"
RIGHT: dict[str, Edits] = {
    "mixed precision": (
        (
            SHARD,
            "    from torch.distributed.fsdp import MixedPrecisionPolicy\n\n"
            "    asked = {'param_dtype': torch.bfloat16, 'reduce_dtype': torch.float32}\n"
            "    inside, logits = (MixedPrecisionPolicy(**asked, output_dtype=own) for own in (None, torch.float32))\n"
            + SHARD.replace("(layer)", "(layer, mp_policy=inside)").replace("(model)", "(model, mp_policy=logits)"),
        ),
        ('dtype="float32", engine', 'dtype="bfloat16", engine'),
    ),
    "replicated over processes": (
        (
            SHARD,
            "    mesh = dist.device_mesh.init_device_mesh('cpu', (size, 1), mesh_dim_names=('replicate', 'shard'))\n"
            + SHARD.replace("(layer)", "(layer, mesh=mesh)").replace("(model)", "(model, mesh=mesh)"),
        ),
    ),
    "gradients reduced after the last micro-batch": (
        (BACKWARD, f"                model.set_requires_gradient_sync(begin + MICRO >= len(rows))\n{BACKWARD}"),
    ),
    "reports of all processes": (
        (
            REPORT,
            "loss=whole.item(), num_tokens=int(every)",
        ),
        (CLIP, f"{CLIP}\n            whole = torch.tensor(total) / size\n            dist.all_reduce(whole)"),
    ),
    "gradients summed, not sharded": (
        (SHARD, ""),
        WHOLE,
        REDUCED,
        ("every.item() / size", "every.item()"),
        ("clip_grad=CLIP_GRAD, asked", "clip_grad=CLIP_GRAD, divisor=1, asked"),
    ),
    "gradients averaged, not sharded": (
        (SHARD, ""),
        WHOLE,
        (REDUCED[0], f"{REDUCED[1]}                value.grad /= size\n"),
    ),
}
FAULTS: dict[str, tuple[Edits, Stage, str]] = {
    "mean of the processes' means": (
        (("share = every.item() / size", "share = sum(map(len, responses))"),), Stage.ADVANTAGE, "ADV001",
    ),
    "gradients summed where they are to be averaged": (
        ((BACKWARD, f"{BACKWARD}            for value in model.parameters():\n                value.grad *= size\n"),),
        Stage.LOSS, "LSS001",
    ),
    "clipped by the norm of a process's shards": (
        ((CLIP, "norm = torch.nn.utils.clip_grad_norm_([each.grad.to_local() for each in model.parameters()], 1.0)"),),
        Stage.TRAIN, "TRN006",
    ),
    "a shard is not stepped": (
        (("            optimizer.step()\n",
          "            kept = model.lm_head.weight.to_local().clone()\n            optimizer.step()\n"
          "            if rank:\n                model.lm_head.weight.to_local().data.copy_(kept)\n"),),
        Stage.TRAIN, "TRN005",
    ),
    "shards sent in the order of another mesh": (
        (("value.detach().full_tensor()", "turned(value.detach().full_tensor())"),
         ("def train(", "def turned(value):\n    return value.roll(value.shape[0] // 2, 0)\n\n\ndef train(")),
        Stage.EXPORT, "WGT005",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("add", tmp_path_factory.mktemp("loop") / "checkpoint")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path):
    with Oracle(checkpoint, 120.0) as started:
        yield started


def run(edits: Edits, checkpoint: Path, oracle: Oracle, folder: Path) -> Report:
    """Run the loop, changed, in two processes; its report."""
    loop = LOOP
    for right, wrong in edits:
        assert loop.count(right) == 1, right
        loop = loop.replace(right, wrong)
    script, trace = folder / "grpo_fsdp.py", folder / "trace"
    script.write_text(loop)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES), *sys.path]),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run([*launch, str(script), str(checkpoint), str(trace)], env=environment, check=True, timeout=300)
    add_oracle(trace, checkpoint, oracle)
    return report_of(read(trace), "trace")


def test_the_loop_holds(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    report = run((), checkpoint, oracle, tmp_path)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    held = {item.code for item in report.outcomes}
    assert held >= {"ADV001", "LSS001", "LSS002", "LSS004", "PCK004", "TRN001", "TRN003", "TRN005", "WGT001", "WGT005"}
    assert not report.gaps


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_variant_holds(name: str, checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    report = run(RIGHT[name], checkpoint, oracle, tmp_path)
    assert report.verdict is Verdict.HOLDS, render_text(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_is_caught_in_its_stage(name: str, checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    edits, stage, code = FAULTS[name]
    report = run(edits, checkpoint, oracle, tmp_path)
    assert report.violated, render_text(report)
    first = report.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is stage, render_text(report)
    assert code in [item.code for item in report.violated]
    assert not [item.code for item in report.outcomes if item.error]
