"""What loops on Megatron have: packs with padding between sequences, masters that an optimizer shards over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from verifier import probe
from verifier.core.store import read
from verifier.report import render_text, report_of


@pytest.mark.parametrize(
    ("told", "wrong"),
    [([0, 4, 6], ""), ([0, 3, 5], ""), ([0, 6], "LGP008"), ([0, 2, 6], "LGP008")],
    ids=["with padding", "of the tokens", "one sequence", "cut elsewhere"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pack_may_have_padding_behind_its_sequences(
    told: list[int], wrong: str, ranks: int, tmp_path: Path
) -> None:  # fmt: skip
    """Kernels may be told of the padding as part of a sequence: nothing in it is attended to by a token."""
    path = tmp_path / "trace"
    opened = [probe.open(path, dtype="float32", rank=rank, world_size=ranks) for rank in range(ranks)]
    for rank, record in enumerate(opened):
        ids = [f"{rank}/0", f"{rank}/1"]
        record.rollouts(1, prompts=[[3], [4]], responses=[[5, 6], [7]], loss_mask=[[1, 1], [1]], versions=0, ids=ids)
        record.micro_batch(
            1, ids, [3, 5, 6, 0, 4, 7], attention_mask=[1, 1, 1, 0, 1, 1], labels=[5, 6, 0, 0, 7, 0],
            loss_mask=[1, 1, 0, 0, 1, 0], cu_seqlens=[0, 4, 6],
            arguments={"cu_seqlens_q": told, "cu_seqlens_kv": told, "cu_seqlens_q_padded": [0, 4, 6]},
        )  # fmt: skip
        record.close()
    report = report_of(read(path), str(path))
    assert {item.code for item in report.violated} == ({wrong} if wrong else set()), render_text(report)
    assert {item.code for item in report.outcomes} >= {"PCK001", "PCK002", "LGP008"}
    assert not [item.code for item in report.outcomes if item.error]


@pytest.mark.parametrize(("parts", "wrong"), [(True, set()), (False, {"TRN006"})])
def test_the_norm_is_of_the_parts_of_all_ranks(parts: bool, wrong: set[str], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    opened = [probe.open(path, dtype="float32", rank=rank, world_size=2) for rank in range(2)]
    for record in opened:
        master = torch.ones(4)  # of a weight of 8
        optimizer = torch.optim.AdamW([master], lr=1e-3)
        record.optimizer(optimizer, [("weight", master)], clip_grad=1.0, parts=parts)
        record.rollouts(1, prompts=[[1]], responses=[[2]], loss_mask=[[1]], versions=0)
        master.grad = torch.ones(4)
        record.gradients(1, [("weight", torch.ones(8))])
        norm = 8**0.5
        master.grad /= norm + 1e-6
        optimizer.step()
        record.step(1, loss=0.0, num_tokens=1, grad_norm=norm)
        record.close()
    report = report_of(read(path), str(path))
    assert {item.code for item in report.violated} == wrong, render_text(report)
    assert {item.code for item in report.outcomes} >= {"TRN005", "TRN006"}
