"""What other trainers have: losses of whole answers, adapters, supervised fine-tuning, ranks with own rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import verifier.checks  # noqa: F401 - fills the registry
from tests.snapshots.check_traces import ARRAYS, MANIFEST, clean
from verifier import probe
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.core.trace import Trace
from verifier.oracle.policy_hf import token_losses
from verifier.probe.loop_oracle import _Recording
from verifier.report import Report, render_text, report_of
from verifier.stages.loss.records import GradientRecord, KeptGradients, LossTerms
from verifier.stages.train.records import StepReport

SIZES = (5, 2, 3)
LOSSES = {
    "gspo": {}, "gspo with kl": {"kl_weight": 0.3, "kl_ratio": True}, "sequence": {}, "sapo": {},
    "clipped with kl": {"kl_weight": 0.3, "kl_ratio": True}, "clipped with own": {"kl_weight": 0.3, "kl_ratio": "own"},
}  # fmt: skip


def of_trl(name: str, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """[B, T] losses as TRL 1.16 has them in `GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss`."""
    mask, advantages = inputs["mask"], inputs["advantage"][:, None]
    difference = inputs["logprob"] - inputs["old"]
    if name == "gspo":
        difference = ((difference * mask).sum(-1) / mask.sum(-1))[:, None]
    if name == "sequence":
        difference = (difference * mask).sum(-1)[:, None]
    ratio = difference.exp()
    if name == "sapo":
        steep = torch.where(advantages > 0, *advantages.new_tensor([1.0, 1.05]))
        losses = -torch.sigmoid(steep * (ratio - 1)) * 4 / steep * advantages
    else:
        losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if options:
        away = inputs["reference"] - inputs["logprob"]
        own = (inputs["logprob"] - inputs["logprob"].detach()).exp()  # NeMo-RL's
        ratio = own if options["kl_ratio"] == "own" else ratio
        losses = losses + options["kl_weight"] * (away.exp() - away - 1) * ratio
    return losses.expand_as(mask)


def inputs_of(scale: float = 0.1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shape = (len(SIZES), max(SIZES))
    old = -torch.rand(shape, generator=draw, dtype=torch.float32) * 3
    moved, away = (torch.randn(shape, generator=draw) * scale for _ in range(2))
    mask = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    return {
        "old": old, "logprob": old + moved, "reference": old + away, "mask": mask.float(),
        "advantage": torch.tensor([1.0, -0.5, 0.25]),
    }  # fmt: skip


def recorded(path: Path, name: str, options: dict[str, Any], said: str = "") -> Any:
    """A step whose loss is TRL's, on real tensors; outcomes by code."""
    inputs = inputs_of()
    inputs["logprob"].requires_grad_(True)
    with probe.open(path, dtype="float32") as record:
        rollouts(record, 2)
        rows = [[row[:size] for row, size in zip(inputs[key], SIZES, strict=True)] for key in ("old", "reference")]
        record.trainer_logprobs(2, rows[0], reference=rows[1], version=0)
        record.advantages(2, inputs["advantage"].tolist())
        record.loss(2, said or name, aggregation="sequence_mean", **options)
        losses = of_trl(name, inputs, options)
        record.token_losses(2, inputs["logprob"], losses, ids=[f"0/{at}" for at in range(3)])
        mean = ((losses * inputs["mask"]).sum(-1) / inputs["mask"].sum(-1)).mean()
        mean.backward()
        record.step(2, loss=mean, num_tokens=sum(SIZES), grad_norm=1.0)
    return report_of(read(path), str(path))


def rollouts(record: Any, step: int, rank: int = 0) -> None:
    record.rollouts(
        step, prompts=[[1]] * 3, responses=[[2] * size for size in SIZES], loss_mask=[[1] * size for size in SIZES],
        versions=step - 1, ids=[f"{rank}/{at}" for at in range(3)],
    )  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_losses_of_whole_answers_and_of_trls_types_hold(case: str, tmp_path: Path) -> None:
    report = recorded(tmp_path / "trace", case.split()[0], LOSSES[case])
    assert report.verdict is Verdict.HOLDS
    assert "LSS004" in {item.code for item in report.outcomes}


@pytest.mark.parametrize("case", LOSSES)
def test_another_ratio_is_a_violation(case: str, tmp_path: Path) -> None:
    said = "clipped" if case.split()[0] != "clipped" else "gspo"
    report = recorded(tmp_path / "trace", case.split()[0], LOSSES[case], said)
    assert "LSS004" in [item.code for item in report.violated]


@pytest.mark.parametrize("case", LOSSES)
def test_the_oracles_gradient_is_that_of_trls_loss(case: str) -> None:
    name, options, inputs = case.split()[0], LOSSES[case], {key: item.double() for key, item in inputs_of().items()}
    mask = inputs["mask"].bool()
    sides = []
    for side in ("trl", "oracle"):
        leaf = inputs["logprob"].clone().requires_grad_(True)
        if side == "trl":
            losses = of_trl(name, {**inputs, "logprob": leaf}, options)[mask]
        else:
            advantage = inputs["advantage"][:, None].expand_as(mask)[mask]
            columns = {"divisor": inputs["old"][mask], "reference": inputs["reference"][mask], "advantage": advantage}
            asked = {
                "loss": name, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "kl_weight": 0.0, "kl_kind": "k3",
                "entropy_weight": 0.0, "steepness": (1.0, 1.05), **options,
            }  # fmt: skip
            losses = token_losses(leaf[mask], torch.zeros(()), columns, asked, SIZES)
        weight = (1 / inputs["mask"].sum(-1))[:, None].expand_as(mask)[mask]
        (losses * weight).sum().backward()
        sides.append((losses.detach(), leaf.grad))
    for ours, theirs in zip(*sides, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


def test_a_loss_without_a_formula_is_not_judged_and_the_report_says_so(tmp_path: Path) -> None:
    report = recorded(tmp_path / "trace", "sapo", {}, "mine")
    assert not report.violated
    for code in ("LSS001", "LSS004"):
        assert "LSS004" not in {item.code for item in report.outcomes}
        assert REGISTRY[code].applies(report.manifest).why == "no formula of the loss `mine` is known"


def test_the_oracle_has_the_rollouts_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    opened = [probe.open(path, dtype="float32", rank=rank, world_size=2) for rank in range(2)]
    for rank, record in enumerate(opened):
        rollouts(record, 1, rank)
        record.loss(1, "cross_entropy")
        record.step(1)
        record.close()
    seen = read(path)
    terms = next(seen.of(LossTerms, version=1))
    found = _Recording(None, seen, tmp_path, tmp_path)._inputs(1, terms)  # type: ignore[arg-type]
    assert found["lengths"].tolist() == [size + 1 for size in SIZES] * 2
    assert found["weight"].sum() == pytest.approx(1)  # a mean over the tokens of both


Batch = Sequence[Sequence[int]]
"""Of each rank the lengths of its answers."""


def ranks_with(path: Path, sizes: Batch, weights: Sequence[Sequence[float]], **options: Any) -> Report:
    """A step of ranks that have answers of their own, whose tokens have these weights in the loss of their rank."""
    opened = [probe.open(path, dtype="float32", rank=rank, world_size=len(sizes)) for rank in range(len(sizes))]
    for rank, (record, rows, shares) in enumerate(zip(opened, sizes, weights, strict=True)):
        own = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.AdamW([own], lr=1e-3)
        record.optimizer(optimizer, [("own", own)], divisor=options.get("gradient_divisor"))
        names = [f"{rank if options.get('ids', True) else 1}/{at}" for at in range(len(rows))]
        masks = [[int(share > 0)] * size for size, share in zip(rows, shares, strict=True)]
        record.rollouts(
            1, prompts=[[1 + at] for at in range(len(rows))], responses=[[2] * size for size in rows], loss_mask=masks,
            versions=0, ids=names, groups=options.get("groups"),
        )  # fmt: skip
        nats = [torch.full((1, size), -1.0, requires_grad=True) for size in rows]
        record.trainer_logprobs(1, [row[0].tolist() for row in nats], version=0)
        record.advantages(1, [1.0] * len(rows))
        record.loss(1, "clipped", aggregation=options.get("aggregation", "token_mean"))
        total = 0.0
        for name, row, share in zip(names, nats, shares, strict=True):
            if share:
                losses = -(row - row.detach()).exp()
                record.token_losses(1, row, losses, ids=[name])
                (losses * share).sum().backward()
                total += float(losses.detach().sum()) * share
        own.grad = torch.ones(4)
        record.gradients(1, [("own", own.grad)])
        optimizer.step()
        record.step(1, loss=total, num_tokens=sum(map(sum, masks)), grad_norm=2.0)
        record.close()
    return report_of(read(path), str(path))


@pytest.mark.parametrize(
    ("sizes", "weights", "options", "wrong"),
    [
        (((3,), (7,)), ((0.2,), (0.2,)), {}, ""),
        (((3,), (7,)), ((1 / 3,), (1 / 7,)), {}, "ADV001"),
        (((3,), (7,)), ((0.1,), (0.1,)), {}, "ADV001"),
        (((3,), (7,)), ((0.1,), (0.1,)), {"gradient_divisor": 1}, ""),
        (((3,), (7,)), ((2 / 3,), (0.0,)), {}, ""),
        (((3,), (7,), (), ()), ((0.4,), (0.4,), (), ()), {}, ""),
        (((3, 2), (7, 4)), ((1 / 6, 1 / 4), (1 / 14, 1 / 8)), {"aggregation": "prompt_mean", "groups": [0, 1]}, ""),
        (((3,), (7,)), ((9.0,), (9.0,)), {"ids": False}, ""),
    ],
    ids=[
        "the mean over all", "means of each rank", "half of it", "summed gradients", "no token of one rank",
        "no answer of two ranks", "prompts numbered by rank", "one id for two answers",
    ],
)  # fmt: skip
def test_ranks_with_rollouts_of_their_own_are_one_batch(
    sizes: Batch, weights: Sequence[Sequence[float]], options: Any, wrong: str, tmp_path: Path
) -> None:
    report = ranks_with(tmp_path / "trace", sizes, weights, **options)
    assert [item.code for item in report.violated] == [wrong] * bool(wrong), render_text(report)
    judged = {"ADV001", "LSS004", "PCK004", "TRN003"} & {item.code for item in report.outcomes}
    assert judged == ({"ADV001", "LSS004", "PCK004", "TRN003"} if options.get("ids", True) else set())
    assert not [item.code for item in report.outcomes if item.error]


def test_a_gradient_that_is_none_is_lacking_if_its_tensor_is_trained(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    model[1].bias.grad = None
    with probe.open(tmp_path / "trace", keep_every=1) as record:
        record.optimizer(torch.optim.AdamW(model[1].parameters()), model.named_parameters())
        record.gradients(1, [(name, item.grad) for name, item in model.named_parameters()])
    (kept,) = read(tmp_path / "trace").of(KeptGradients)
    assert (*kept.dtypes,) == ("1.weight",)
    assert kept.lacking == ("1.bias",)


def test_gradients_of_nothing_lack_every_tensor(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with probe.open(tmp_path / "trace", keep_every=1) as record:
        record.optimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())
        record.gradients(1, [])
    (kept,) = read(tmp_path / "trace").of(KeptGradients)
    assert kept.lacking == ("bias", "weight")


@pytest.mark.parametrize(
    ("command", "losses", "verdict"),
    [
        ("probe", (7.0, 9.0), Verdict.HOLDS),
        ("probe", (8.5, 9.0), Verdict.VIOLATED),
        ("roundtrip", (7.0, 9.0), Verdict.VIOLATED),
    ],
)
def test_ranks_of_a_loop_that_report_their_own_loss_are_judged_by_its_mean(
    command: str, losses: Any, verdict: Verdict
) -> None:
    """A round trip's ranks report what all have: a number that was not reduced is wrong there."""
    right = {"loss": 8.0, "loss_scale": 8.0, "num_tokens": 6}
    records = [replace(item, **right) if type(item) is GradientRecord else item for item in clean()]
    report = next(item for item in records if type(item) is StepReport)
    own = [replace(report, rank=rank, num_tokens=2 + 2 * rank, loss=loss) for rank, loss in enumerate(losses)]
    kept = [item for item in records if type(item) is not StepReport]
    trace = Trace(replace(MANIFEST, command=command), kept + own, ARRAYS.__getitem__)
    assert run_check(REGISTRY["LSS002"], trace).verdict is verdict
