"""What verl's loop has: terms that are averaged apart, KL estimates, cut groups, schedules of batches, tied heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import verifier.checks  # noqa: F401 - fills the registry
from tests.unit.probe.test_other_trainers import SIZES, inputs_of, rollouts
from tests.unit.probe.whole_loop import CONFIG
from verifier import probe
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.errors import UsageError
from verifier.oracle.policy_hf import token_losses
from verifier.report import Report, render_text, report_of

CASES: dict[str, dict[str, Any]] = {
    "clipped": {}, "reinforce": {}, "clipped k1": {"kl_kind": "k1"}, "clipped k2": {"kl_kind": "k2"},
    "clipped k3": {"kl_kind": "k3", "kl_limit": 0.02}, "clipped abs": {"kl_kind": "abs"},
    "clipped k1+": {"kl_kind": "k1+"}, "reinforce k3+": {"kl_kind": "k3+", "kl_limit": 0.02},
}  # fmt: skip


def terms_of_verl(name: str, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """[B, T] loss of the policy, and the KL, as verl 0.9.1 has them in core_algos.py."""
    current, advantages = inputs["logprob"], inputs["advantage"][:, None]
    ratio = (current - inputs["old"]).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if name == "reinforce":
        losses = -current * advantages
    if not options:
        return [losses]
    away, kind = inputs["reference"] - current, options["kl_kind"]
    squared = away.square() / 2
    found = {"k1": -away, "k2": squared, "k3": (away.exp() - away - 1), "abs": away.abs()}[kind.removesuffix("+")]
    found = found.clamp(max=options.get("kl_limit", 10.0))
    return [losses, squared - squared.detach() + found.detach() if kind.endswith("+") else found]


def recorded(path: Path, name: str, options: dict[str, Any], told: dict[str, Any], dropped: int = 0) -> Report:
    inputs = inputs_of()
    inputs["logprob"].requires_grad_(True)
    with probe.open(path, dtype="float32") as record:
        rollouts(record, 2)
        rows = [[row[:size] for row, size in zip(inputs[key], SIZES, strict=True)] for key in ("old", "reference")]
        record.trainer_logprobs(2, rows[0], reference=rows[1], version=0)
        record.advantages(2, inputs["advantage"].tolist())
        record.loss(2, name, aggregation="token_mean", kl_weight=0.3 if options else 0.0, **told)
        kept, ids, total = slice(0, 3 - dropped), [f"0/{at}" for at in range(3 - dropped)], torch.zeros(())
        given = {key: value[kept] for key, value in inputs.items()}
        terms = terms_of_verl(name, given, options)
        factors = (1.0, 0.3)[: len(terms)]
        record.token_losses(2, given["logprob"], list(zip(factors, terms, strict=True)), ids=ids)
        for factor, term in zip(factors, terms, strict=True):
            total = total + factor * (term * inputs["mask"][kept]).sum() / sum(SIZES)
        total.backward()
        record.step(2, loss=total, num_tokens=sum(SIZES), grad_norm=1.0)
    return report_of(read(path), str(path))


@pytest.mark.parametrize("case", CASES)
def test_terms_that_are_averaged_apart_are_one_loss(case: str, tmp_path: Path) -> None:
    name, options = case.split()[0], CASES[case]
    report = recorded(tmp_path / "trace", name, options, options)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert "LSS004" in {item.code for item in report.outcomes}
    other = {"kl_kind": "k2" if options.get("kl_kind") != "k2" else "k1"} if options else {"clip_high": 1e-3}
    if options or name != "reinforce":
        report = recorded(tmp_path / "other", name, options, other)
        assert "LSS004" in [item.code for item in report.violated]


@pytest.mark.parametrize("case", CASES)
def test_the_oracles_gradient_is_that_of_verls_terms(case: str) -> None:
    name, options, inputs = case.split()[0], CASES[case], {key: item.double() for key, item in inputs_of().items()}
    mask, sides = inputs["mask"].bool(), []
    for side in ("verl", "oracle"):
        leaf = inputs["logprob"].clone().requires_grad_(True)
        if side == "verl":
            terms = terms_of_verl(name, {**inputs, "logprob": leaf}, options)
            losses = sum(factor * term for factor, term in zip((1.0, 0.3), terms, strict=False))[mask]
        else:
            columns = {key: inputs[key].expand_as(mask)[mask] for key in ("reference",)} | {
                "divisor": inputs["old"][mask], "advantage": inputs["advantage"][:, None].expand_as(mask)[mask],
            }  # fmt: skip
            asked = {
                "loss": name, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "entropy_weight": 0.0,
                "kl_weight": 0.3 if options else 0.0, "kl_kind": "k3", **options,
            }  # fmt: skip
            losses = token_losses(leaf[mask], torch.zeros(()), columns, asked, SIZES)
        losses.sum().backward()
        sides.append((losses.detach(), leaf.grad))
    for ours, theirs in zip(*sides, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


def test_a_token_that_came_to_no_loss_is_not_the_means_fault(tmp_path: Path) -> None:
    report = recorded(tmp_path / "trace", "clipped", {}, {}, dropped=1)
    found = {item.code for item in report.violated}
    assert "PCK004" in found
    assert "ADV001" not in found


def test_an_estimate_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        rollouts(record, 2)
        with pytest.raises(UsageError, match="none of k1, k2"):
            record.loss(2, "clipped", kl_kind="full")


@pytest.mark.parametrize("whole", [True, False])
def test_a_group_that_a_mini_batch_cuts_is_judged_with_its_others(whole: bool, tmp_path: Path) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25])
    values = (rewards - (rewards if whole else rewards[:2]).mean()) / ((rewards if whole else rewards[:2]).std() + 1e-6)
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(
            1, prompts=[[1]] * 2, responses=[[2, 3]] * 2, loss_mask=[[1, 1]] * 2, versions=0, rewards=rewards[:2],
            groups=["a", "a"],
        )  # fmt: skip
        record.trainer_logprobs(1, [[-1.0, -2.0]] * 2)
        beside = [("a", float(rewards[at]), float(values[at]), 2) for at in (2, 3)]
        record.advantages(1, values[:2], estimator="grpo", dtype="float32", epsilon=1e-6, ddof=1, others=beside)
    report = report_of(read(tmp_path / "trace"), "trace")
    assert {item.code for item in report.violated} == (set() if whole else {"ADV002"})
    assert next(item for item in report.outcomes if item.code == "ADV002").num_compared == 4


@pytest.mark.parametrize(("moves", "told"), [(2, 2), (1, 2), (2, 1)])
def test_a_schedule_counts_batches_of_several_steps(moves: int, told: int, tmp_path: Path) -> None:
    """Its first batch has a rate of 0, and it has moved on when the weights are exported."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.optimizer(
            optimizer, [("w", weight)], scheduler=schedule, schedule="constant", learning_rate=0.1, warmup_steps=2,
            updates_per_rate=told,
        )  # fmt: skip
        record.weights_exported({"w": weight.detach()}, 0, live={"w": weight.detach()})
        for step in range(1, 7):
            record.rollouts(step, prompts=[[1]], responses=[[0, 1]], loss_mask=[[1, 1]], versions=-1)
            record.loss(step, "cross_entropy")
            nats = torch.nn.functional.log_softmax(weight, 0)[:2][None] + 0
            losses = -nats
            record.token_losses(step, nats, losses, ids=[f"{step}/0"])
            optimizer.zero_grad()
            losses.mean().backward()
            record.gradients(step, [("w", weight.grad)])
            optimizer.step()
            record.step(step, loss=losses.mean(), num_tokens=2, grad_norm=float(weight.grad.norm()))
            if step % moves == 0:
                schedule.step()
            record.weights_exported({"w": weight.detach()}, step, live={"w": weight.detach()})
    report = report_of(read(tmp_path / "trace"), "trace")
    found = {item.code for item in report.violated}
    assert (found == set()) if moves == told else ({"TRN002", "TRN003"} <= found), render_text(report)


@pytest.mark.parametrize("moved", [False, True])
def test_a_tied_head_may_be_held_under_both_names(moved: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weight = torch.arange(12.0).view(3, 4)
    save_file({"model.embed_tokens.weight": weight}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    held = {"model.embed_tokens.weight": weight, "lm_head.weight": weight + moved}
    with probe.open(tmp_path / "trace", model=folder, dtype="float32") as record:
        record.weights_held(held, 0, after="load")
    report = report_of(read(tmp_path / "trace"), "trace")
    assert [item.code for item in report.violated] == (["WGT001"] if moved else [])
    assert next(item for item in report.outcomes if item.code == "WGT001").num_compared == 2


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_a_tied_head_is_saved_under_one_name(sent: bool, wrong: bool, tmp_path: Path) -> None:
    """transformers saves the embedding alone; the loop's state dict, and what it sends, have both names."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    for folder, value in ((source, 0.0), (saved, 1.0)):
        folder.mkdir()
        save_file({"model.embed_tokens.weight": torch.arange(12.0).view(3, 4) + value}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    weight = torch.arange(12.0).view(3, 4) + 1
    held = {"model.embed_tokens.weight": weight, "lm_head.weight": weight + wrong}
    with probe.open(tmp_path / "trace", model=source, dtype="float32") as record:
        if sent:
            record.weights_exported(held, 1, live=held)
        record.export_saved(saved, 1, live=held)
    report = report_of(read(tmp_path / "trace"), "trace")
    found = {item.code for item in report.violated}
    assert found == ((({"WGT014"} if sent else set()) | {"WGT019"}) if wrong else set()), render_text(report)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("wrong", [False, True])
def test_importance_weights_are_the_capped_ratio_to_the_engine(level: str, wrong: bool, tmp_path: Path) -> None:
    """As verl's rollout correction makes them, in float32."""
    inputs = inputs_of()
    engine = inputs["old"] + torch.randn(inputs["old"].shape, generator=torch.Generator().manual_seed(5)) * 0.3
    away = (inputs["old"] - engine) * inputs["mask"]
    ratio = (away if level == "token" else away.sum(-1, keepdim=True).expand_as(away)).exp()
    weights = ratio.clamp(max=1.1) if not wrong else ratio
    cut = {
        key: [row[:size] for row, size in zip(value, SIZES, strict=True)]
        for key, value in {"engine": engine, "old": inputs["old"], "weights": weights}.items()
    }
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(
            2, prompts=[[1]] * 3, responses=[[2] * size for size in SIZES], loss_mask=[[1] * size for size in SIZES],
            engine_logprobs=cut["engine"], versions=1, ids=[f"0/{at}" for at in range(3)],
        )  # fmt: skip
        record.trainer_logprobs(2, cut["old"])
        told = {"weights": cut["weights"], "weight_level": level, "weight_cap": 1.1}
        record.advantages(2, inputs["advantage"].tolist(), dtype="float32", **told)
        record.loss(2, "clipped")
        current = inputs["old"].clone().requires_grad_(True)
        losses = -(current - inputs["old"]).exp() * inputs["advantage"][:, None] * weights
        record.token_losses(2, current, losses, ids=[f"0/{at}" for at in range(3)])
        mean = (losses * inputs["mask"]).sum() / sum(SIZES)
        mean.backward()
        record.step(2, loss=mean, num_tokens=sum(SIZES), grad_norm=1.0)
    report = report_of(read(tmp_path / "trace"), "trace")
    found = {item.code for item in report.violated} - {"LGP009"}  # the engine is far off on purpose
    assert found == ({"ADV003"} if wrong else set()), render_text(report)
    assert "LSS004" in {item.code for item in report.outcomes}


MASKS = {
    "token": (0.8, 1.3), "sequence": (0.75, 1.5), "geometric": (0.95, 1.05), "token_k1": (-0.2, 0.3),
    "token_k3": (0.0, 0.02), "sequence_k2": (0.0, 0.12), "geometric_k3": (0.0, 0.03), "greatest_k2": (0.0, 0.07),
}  # fmt: skip
WRONG = {
    "": set(), "kept": {"ADV003"}, "one more": {"ADV003"}, "end lost": {"DAT008"}, "as a factor": set(),
    "a factor of the rejected": {"ADV003"},
}  # fmt: skip
"""What is done with tokens that a mask does not keep -> checks that it violates."""


def stays(away: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """[B, T] bool, by old less engine."""
    level, _, kind = level.partition("_")
    low, high = MASKS[f"{level}_{kind}" if kind else level]
    each = {"": away, "k1": -away, "k2": away.square() / 2, "k3": away.exp() - 1 - away}[kind] * mask
    found = {
        "token": each, "sequence": each.sum(-1, keepdim=True), "greatest": each.amax(-1, keepdim=True),
        "geometric": each.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True),
    }[level].expand_as(away)  # fmt: skip
    found = found if kind else found.exp()
    return (low <= found) & (found <= high) & mask.bool()


@pytest.mark.parametrize("level", MASKS)
@pytest.mark.parametrize("wrong", WRONG)
def test_tokens_leave_the_loss_by_their_distance_from_the_engine(level: str, wrong: str, tmp_path: Path) -> None:
    """As verl's rollout correction rejects tokens, and as a mask in their weights, in float32."""
    inputs = inputs_of()
    old, mask = inputs["old"], inputs["mask"]
    engine = old + torch.randn(old.shape, generator=torch.Generator().manual_seed(7)) * 0.25
    kept = stays(old - engine, mask, level)
    assert 0 < kept.sum() < mask.sum()
    is_factor, in_loss, away = "factor" in wrong, kept.clone(), mask.bool() & ~kept
    if wrong == "kept" or is_factor:
        in_loss, away = mask.bool(), torch.zeros_like(kept)
    elif wrong:
        ends = mask.cumsum(-1) == mask.sum(-1, keepdim=True)
        place = tuple((kept if wrong == "one more" else kept & ends).nonzero()[0])
        in_loss[place] = False
        away[place] = wrong == "one more"
    factor = (kept if wrong == "as a factor" else ~kept) if is_factor else torch.ones_like(kept)
    rows = {"engine": engine, "old": old, "mask": in_loss, "rejected": away, "weights": factor.float()}
    cut = {key: [row[:size] for row, size in zip(value, SIZES, strict=True)] for key, value in rows.items()}
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(
            2, prompts=[[1]] * 3, responses=[[2] * (size - 1) + [3] for size in SIZES], loss_mask=cut["mask"],
            engine_logprobs=cut["engine"], versions=1, ids=[f"0/{at}" for at in range(3)], end_token=3,
            max_response_tokens=9,
        )  # fmt: skip
        record.trainer_logprobs(2, cut["old"])
        told = {"weights": cut["weights"]} if is_factor else {"rejected": cut["rejected"]}
        record.advantages(2, inputs["advantage"].tolist(), dtype="float32", masks=[(level, *MASKS[level])], **told)
        record.step(2)
    report = report_of(read(tmp_path / "trace"), "trace")
    by_the_way = {"LGP009"} | ({"ADV003"} if wrong == "end lost" else set())  # means are of fewer tokens then
    assert {item.code for item in report.violated} - by_the_way == WRONG[wrong], render_text(report)
    assert "DAT008" in {item.code for item in report.outcomes}


def test_masks_of_no_known_level_are_refused(tmp_path: Path) -> None:
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        rollouts(record, 2)
        with pytest.raises(UsageError, match="masks of `token_k9`"):
            record.advantages(2, [0.0] * 3, masks=[("token_k9", 0.0, 1.0)])


def test_a_step_without_a_token_in_the_loss_has_no_entropies(tmp_path: Path) -> None:
    inputs = inputs_of()
    inputs["logprob"].requires_grad_(True)
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        empty = [[0] * size for size in SIZES]
        record.rollouts(
            2, prompts=[[1]] * 3, responses=[[2] * size for size in SIZES], loss_mask=empty, versions=1,
            ids=[f"0/{at}" for at in range(3)],
        )  # fmt: skip
        record.trainer_logprobs(2, [row[:size] for row, size in zip(inputs["old"], SIZES, strict=True)])
        record.advantages(2, [0.0] * 3)
        record.loss(2, "clipped")
        losses = inputs["logprob"] * 1.0
        record.token_losses(2, inputs["logprob"], losses, ids=[f"0/{at}" for at in range(3)], mask=losses * 0)
        (losses * 0).sum().backward()
        record.step(2)
    assert "entropies" not in read(tmp_path / "trace").manifest.facts.told
