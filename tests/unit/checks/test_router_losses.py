"""LSS006: gradients of the routers' own losses, against torch's of the losses as they are written.

What this does not exercise: real routers (tests/dist/test_train_clean.py), and bugs that LSS006 catches (tests/faults).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest, MeshSizes
from verifier.core.trace import Trace
from verifier.stages.loss.checks_router_losses import router_loss_differs_from_formula
from verifier.stages.loss.records import RouterGradients

ROWS, EXPERTS, TOPK = 6, 4, 2
LOGITS = torch.tensor(np.random.default_rng(1).normal(size=(2, ROWS, EXPERTS)))
"""Of two tensor-parallel ranks, which have half of the micro-batch each."""


def scores_of(logits: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "softmax":
        return torch.softmax(logits, -1)
    raw = torch.sigmoid(logits) if kind == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    return raw / raw.sum(-1, keepdim=True)


def traced(kind: str = "softmax", *, aux: float = 0.01, z: float = 0.002, factor: float = 1.0, **asked: Any) -> Trace:
    """Gradients of both losses over all rows of two ranks, times the rows, as autograd finds them."""
    logits = LOGITS.clone().requires_grad_()
    whole = logits.reshape(-1, EXPERTS)
    scores = scores_of(whole, kind)
    counts = [torch.bincount(torch.topk(scores_of(part, kind), TOPK).indices.flatten(), minlength=EXPERTS)
              for part in LOGITS]  # fmt: skip
    share = sum(counts) / (TOPK * len(whole))
    balance = aux * EXPERTS * (share * scores.mean(0)).sum()
    loss = (balance + z * torch.logsumexp(whole, -1).square().mean()) * len(whole)
    (gradient,) = torch.autograd.grad(loss, logits)
    records, arrays = [], {}
    for rank in range(2):
        records.append(
            RouterGradients(
                name="update 1", version=1, rank=rank, coordinate=f"tp={rank}", layers=(1,), numbers=(0,),
                rows=(ROWS,), kept=(ROWS,), experts_of_row=TOPK, scores=kind, dtype="float32", array=f"{rank}",
            )
        )  # fmt: skip
        arrays[f"{rank}"] = {
            "counts": counts[rank][None].numpy(), "logits": LOGITS[rank].numpy(),
            "found": factor * gradient[rank].numpy(), "size": np.full(ROWS, 0.01),
        }  # fmt: skip
    options = {"moe_load_balancing": "aux_loss", "moe_aux_loss": aux, "moe_z_loss": z, **asked}
    manifest = Manifest(complete=True, mesh=MeshSizes(tp=2), world_size=2, config={"megatron": options})
    return Trace(manifest, records, arrays.__getitem__)


def wrong(trace: Trace) -> int:
    return sum(not item.same for item in router_loss_differs_from_formula(trace))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_gradients_of_both_losses_hold(kind: str) -> None:
    assert run_check(REGISTRY["LSS006"], traced(kind)).verdict is Verdict.HOLDS


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.999, 1.001, 2.0])
def test_another_scale_is_seen_on_each_rank(factor: float) -> None:
    assert wrong(traced(factor=factor)) == 2


def test_a_coefficient_that_is_not_applied_is_seen() -> None:
    assert wrong(traced(moe_aux_loss=0.02)) == 2
    assert wrong(traced(moe_z_loss=0.0)) == 2
    assert wrong(traced(moe_load_balancing="none")) == 2


def test_a_rank_that_did_not_record_is_missed() -> None:
    trace = traced()
    records = list(trace.of(RouterGradients))[:1]
    short = Trace(trace.manifest, records, {"0": trace.arrays(records[0])}.__getitem__)
    assert any(item.absent for item in router_loss_differs_from_formula(short))


def of_all_ranks(*, left: torch.Tensor | int = 0) -> Trace:
    """Gradients of a balancing loss over two data-parallel ranks, in two micro-batches.

    Args:
        left: rows of each expert that the step before has left, of which the losses are a mean too.
    """
    logits = torch.tensor(np.random.default_rng(2).normal(size=(2, 2, ROWS, EXPERTS)))  # [micro-batch, rank, ...]
    counts = [
        [torch.bincount(torch.topk(part, TOPK).indices.flatten(), minlength=EXPERTS) for part in each]
        for each in logits
    ]
    running = [sum(sum(each) + left for each in counts[: number + 1]) / (number + 1) for number in range(2)]
    records, arrays = [], {}
    for rank in range(2):
        found = []
        for number in range(2):
            own = logits[number, rank].clone().requires_grad_()
            total = 2 * ROWS
            loss = 0.01 * EXPERTS * (running[number] * torch.softmax(own, -1).sum(0)).sum() / (TOPK * total * total)
            found.append(torch.autograd.grad(loss * ROWS, own)[0])
        records.append(
            RouterGradients(
                name="update 1", version=1, rank=rank, coordinate=f"dp={rank}", layers=(1, 1), numbers=(0, 1),
                rows=(ROWS, ROWS), kept=(ROWS, ROWS), experts_of_row=TOPK, scores="softmax", dtype="float32",
                array=f"{rank}",
            )
        )  # fmt: skip
        arrays[f"{rank}"] = {
            "counts": torch.stack([each[rank] for each in counts]).numpy(),
            "logits": logits[:, rank].reshape(-1, EXPERTS).numpy(), "found": torch.cat(found).numpy(),
            "size": np.full(2 * ROWS, 1e-6),
        }  # fmt: skip
    options = {"moe_load_balancing": "global_aux_loss", "moe_aux_loss": 0.01, "moe_z_loss": 0.0}
    manifest = Manifest(complete=True, mesh=MeshSizes(dp=2), world_size=2, config={"megatron": options})
    return Trace(manifest, records, arrays.__getitem__)


def test_a_loss_over_all_ranks_and_micro_batches_holds() -> None:
    assert run_check(REGISTRY["LSS006"], of_all_ranks()).verdict is Verdict.HOLDS


def test_rows_that_an_earlier_step_left_are_seen() -> None:
    one = torch.tensor([3, 0, 0, 0])
    assert wrong(of_all_ranks(left=one)) == 4
