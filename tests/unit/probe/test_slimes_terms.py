"""What slime has: packs that end with padding, losses of packs, masters that are views of the model's buffer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from verifier import probe
from verifier.core.store import read
from verifier.errors import UsageError
from verifier.report import Report, render_text, report_of

PROMPTS, RESPONSES = [[3], [4]], [[5, 6, 7], [8]]
HOOKED = """
import sys, torch
from verifier import probe
buffer = torch.zeros(8)
weight = torch.nn.Parameter(torch.randn(2, 3))
weight.data = buffer[:6].view(2, 3)
optimizer = torch.optim.AdamW([weight], lr=1e-3)
master = weight.view(-1)[:4]
optimizer.param_groups[0]["params"] = [master]
with torch.no_grad():
    weight.copy_(torch.ones(2, 3))
with probe.open(sys.argv[1], dtype="float32") as record:
    record.optimizer(optimizer, [("weight", master)], parts=True)
"""


def judged(path: Path) -> Report:
    return report_of(read(path), str(path))


@pytest.mark.parametrize(
    ("mask", "told", "wrong"),
    [
        ([1, 1, 1, 0, 1, 0, 0, 0], [0, 4, 6, 8], set()),
        ([1, 1, 1, 0, 1, 0, 1, 0], [0, 4, 6, 8], {"PCK001"}),
        ([1, 1, 1, 0, 1, 0, 0, 0], [0, 4, 8], {"LGP008"}),
    ],
    ids=["out of the loss", "in the loss", "told of no padding"],
)
def test_a_pack_may_end_with_a_sequence_of_padding(
    mask: list[int], told: list[int], wrong: set[str], tmp_path: Path
) -> None:  # fmt: skip
    path = tmp_path / "trace"
    with probe.open(path, dtype="float32") as record:
        record.rollouts(1, prompts=PROMPTS, responses=RESPONSES, loss_mask=[[1] * 3, [1]], versions=0, ids=[0, 1])
        record.micro_batch(
            1, [0, 1], [3, 5, 6, 7, 4, 8, 0, 0], loss_mask=mask, cu_seqlens=[0, 4, 6, 8],
            arguments={"cu_seqlens_q": told, "cu_seqlens_kv": told, "max_seqlen_q": 4, "max_seqlen_kv": 4},
        )  # fmt: skip
    report = judged(path)
    assert {item.code for item in report.violated} == wrong, render_text(report)
    assert {item.code for item in report.outcomes} >= {"PCK001", "PCK002", "LGP008"}


def test_a_pack_has_no_second_sequence_of_padding(tmp_path: Path) -> None:
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(1, prompts=PROMPTS, responses=RESPONSES, loss_mask=[[1] * 3, [1]], versions=0, ids=[0, 1])
        with pytest.raises(UsageError, match="its tensors other rows"):
            record.micro_batch(1, [0, 1], [3, 5, 6, 7, 4, 8, 0, 0], cu_seqlens=[0, 4, 6, 7, 8])


@pytest.mark.parametrize(
    ("mask", "factor", "wrong"),
    [(None, 1.0, set()), ([1, 1, 0, 1], 1.0, set()), (None, 1.5, {"LSS004"})],
    ids=["by the rollouts", "told", "of another loss"],
)
def test_a_loss_may_be_of_a_pack(mask: list[int] | None, factor: float, wrong: set[str], tmp_path: Path) -> None:
    path, in_loss = tmp_path / "trace", torch.tensor(mask or [1, 1, 1, 1])
    with probe.open(path, dtype="float32") as record:
        old = torch.tensor([-1.0, -2.0, -3.0, -4.0])
        record.rollouts(
            1, prompts=PROMPTS, responses=RESPONSES, loss_mask=[in_loss[:3], in_loss[3:]], versions=0, ids=[0, 1],
            rewards=[1.0, 0.0], groups=[0, 0], engine_logprobs=[old[:3], old[3:]],
        )  # fmt: skip
        record.trainer_logprobs(1, [old[:3], old[3:]])
        record.advantages(1, [0.5, -0.5], estimator="dr_grpo", dtype="float32")
        record.loss(1, "clipped", aggregation="token_mean")
        logprob = old.clone().requires_grad_()
        losses = -factor * (logprob - old).exp() * torch.tensor([0.5, 0.5, 0.5, -0.5])
        record.token_losses(1, logprob, losses, ids=[0, 1], mask=mask and in_loss, old=old)
        ((losses * in_loss).sum() / in_loss.sum()).backward()
        record.step(1)
    report = judged(path)
    assert {item.code for item in report.violated} == wrong, render_text(report)
    assert {item.code for item in report.outcomes} >= {"ADV001", "LSS003", "LSS004", "PCK004"}


@pytest.mark.parametrize(("size", "ids"), [(5, [0, 1]), (3, [0, 1]), (4, [0]), (3, [0, 1, 0])])
def test_a_loss_of_a_pack_has_a_value_for_each_token_of_its_responses(
    size: int, ids: list[int], tmp_path: Path
) -> None:  # fmt: skip
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(1, prompts=PROMPTS, responses=RESPONSES, loss_mask=[[1] * 3, [1]], versions=0, ids=[0, 1])
        logprob = torch.zeros(size, requires_grad=True)
        with pytest.raises(UsageError, match="of other lengths"):
            record.token_losses(1, logprob, -logprob, ids=ids)


def test_a_master_may_be_a_view_of_what_was_written_since(tmp_path: Path) -> None:
    """torch ends a process that puts a hook on such a tensor."""
    subprocess.run([sys.executable, "-c", HOOKED, str(tmp_path / "trace")], check=True)


@pytest.mark.parametrize(("parts", "wrong"), [(True, set()), (False, {"TRN002"})])
def test_whether_vectors_decay_is_not_judged_of_flat_parts(parts: bool, wrong: set[str], tmp_path: Path) -> None:
    path, master = tmp_path / "trace", torch.ones(4)  # of a matrix
    with probe.open(path, dtype="float32") as record:
        optimizer = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.1)
        record.optimizer(
            optimizer, [("weight", master)], schedule="constant", learning_rate=1e-3, weight_decay=0.1, parts=parts,
            vectors_decay=False, total_steps=1,
        )  # fmt: skip
        record.rollouts(1, prompts=[[1]], responses=[[2]], loss_mask=[[1]], versions=0)
        master.grad = torch.ones(4)
        record.gradients(1, [("weight", master.grad)])
        optimizer.step()
        record.step(1, loss=0.0, num_tokens=1, grad_norm=2.0)
    report = judged(path)
    assert {item.code for item in report.violated} == wrong, render_text(report)
    assert "TRN002" in {item.code for item in report.outcomes}


@pytest.mark.parametrize(("floor", "wrong"), [(0.5, set()), (0.0, {"ADV003"}), (0.6, {"ADV003"})])
def test_weights_may_have_a_least(floor: float, wrong: set[str], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with probe.open(path, dtype="float32") as record:
        record.rollouts(
            1, prompts=PROMPTS, responses=RESPONSES, loss_mask=[[1] * 3, [1]], versions=0, rewards=[1.0, 0.0],
            groups=[0, 0], engine_logprobs=[[-1.0] * 3, [-1.0]],
        )  # fmt: skip
        record.trainer_logprobs(1, [[-1.0, -2.0, -0.9], [-0.1]])
        weights = [torch.tensor([0.0, -1.0, 0.1]).exp().clamp(0.5, 2.0), torch.tensor([0.9]).exp().clamp(0.5, 2.0)]
        record.advantages(
            1, [0.5, -0.5], estimator="dr_grpo", dtype="float32", weights=weights, weight_level="token",
            weight_floor=floor, weight_cap=2.0,
        )  # fmt: skip
    report = judged(path)
    assert {item.code for item in report.violated if item.code.startswith("ADV")} == wrong, render_text(report)
    assert "ADV003" in {item.code for item in report.outcomes}
