"""Rows of the loss, made by the trainer's own losses on a real pack, hold; each changed option violates LSS004."""

import dataclasses

import numpy as np
import pytest
import torch

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.algorithms.registry import LossOptions
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.rollout import make_rollout
from verifier.megatron.pack import pack
from verifier.megatron.policy_loss_megatron import LossMeter, policy_loss
from verifier.megatron.token_layout import Alignment
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.logprob.records import ReferenceShard
from verifier.stages.loss.records import LossRows, LossTerms
from verifier.stages.train.records import TrainerStep

IDS, LENGTHS, PROMPTS = ("x", "y", "z"), (9, 6, 7), (3, 2, 2)
OPTIONS = {
    "clipped": LossOptions(clip_low=0.1, clip_high=0.3),
    "dual clip": LossOptions(clip_low=0.1, clip_high=0.3, dual_clip=1.4),
    "gspo": LossOptions(clip_low=0.01, clip_high=0.02),
    "cispo": LossOptions(clip_low=0.2, clip_high=0.1),
    "importance": LossOptions(),
    "k1": LossOptions(kl_weight=0.3, kl_kind="k1"),
    "k2": LossOptions(kl_weight=0.3, kl_kind="k2"),
    "k3 and entropy": LossOptions(kl_weight=0.3, entropy_weight=0.05),
    "cross_entropy": LossOptions(),
}
CHANGES = {
    "clipped": {"clip_high": 0.1}, "dual clip": {"dual_clip": None}, "gspo": {"clip_low": 0.5, "clip_high": 0.5},
    "cispo": {"clip_high": 0.3}, "k1": {"kl_weight": 0.1}, "k2": {"kl_kind": "k1"},
    "k3 and entropy": {"entropy_weight": 0.0},
}  # fmt: skip


def traced(case: str, used: LossOptions, scale: float = 1.0, far: float = 0.0) -> Trace:
    """A step that computes one loss, and says that it was asked for the case's options.

    Of `far` nats divisor and reference are off: of GSPO those of all tokens, else of every third.
    """
    draw = np.random.default_rng(7)
    name = case if case in ("gspo", "cispo", "importance", "cross_entropy") else "clipped"
    rollouts = [
        make_rollout(own, range(prompt), range(length - prompt))
        for own, length, prompt in zip(IDS, LENGTHS, PROMPTS, strict=True)
    ]
    tokens = sum(LENGTHS)
    mask = np.concatenate([rollout.mask for rollout in rollouts])
    current = draw.normal(-2, 0.5, tokens).astype(np.float32)
    batch = {
        "divisor": (current + draw.normal(0, 0.3, tokens)).astype(np.float32),
        "reference": (current + draw.normal(0, 0.3, tokens)).astype(np.float32),
        "advantage": draw.normal(0, 1, tokens),
    }
    every = 1 if name == "gspo" else 3
    batch["divisor"][::every] += np.float32(far)
    batch["reference"][::3] += np.float32(far)
    weight = np.where(mask, draw.uniform(0.5, 1, tokens), 0) / mask.sum()
    given = {**batch, "weight": weight * mask.sum()}
    if name == "cross_entropy":
        given = {"weight": given["weight"]}
    ends = np.cumsum(LENGTHS)[:-1]
    packed = pack(rollouts, Alignment(), range(3), {key: np.split(value, ends) for key, value in given.items()})
    rows = torch.zeros(packed.num_rows)
    known = packed.ledger_T > 0
    starts = torch.tensor([0, *np.cumsum(LENGTHS)])
    places = starts[(packed.ledger_T[known] >> 32) - 1] + (packed.ledger_T[known] & (2**32 - 1))
    rows[known] = torch.from_numpy(current)[places]
    logprob_T, entropy_T = rows.requires_grad_(), torch.full((packed.num_rows,), 1.5, requires_grad=True)
    meter = LossMeter(rows=True)
    loss_T = policy_loss(name, used, meter)(logprob_T * 1, entropy_T * 1, packed)
    total = torch.where(packed.loss_mask_T, packed.columns["weight"] * loss_T, 0).sum()
    (scale * total).backward()
    arrays = {"rows": meter.rows(), "columns": {"weight": weight, "mask": mask}, "policy": {**batch, "mask": mask}}
    asked = dataclasses.asdict(OPTIONS[case])
    records = [
        LossRows(name="update 1", version=1, coordinate="", array="rows"),
        LossTerms(name="loss", version=1, loss=name, **asked),
        LossColumns(
            name="update 1", version=1, aggregation="token_mean", ids=IDS, groups=IDS, lengths=LENGTHS, array="columns"
        ),
        TrainerStep(
            name="update 1", version=1, step=1, loss=float(total.detach()) / float(mask.sum()),
            num_tokens=int(mask.sum()), grad_norm=1.0, learning_rate=0.0, weight_decay=0.0, optimizer_steps=1,
            scheduler_steps=1,
        ),
    ]  # fmt: skip
    if name != "cross_entropy":
        records.append(
            PolicyColumns(
                name="policy inputs", version=1, ids=IDS, lengths=LENGTHS, ratio_over="old", weight_level="",
                weight_cap=2.0, max_staleness=0, trained_version=0,
                array="policy",
            )
        )  # fmt: skip
    return Trace(Manifest(), records, arrays.__getitem__)


@pytest.mark.parametrize("case", OPTIONS)
def test_holds_for_every_loss(case):
    trace = traced(case, OPTIONS[case])
    for code in ("LSS004", "PCK004"):
        outcome = run_check(REGISTRY[code], trace)
        assert (outcome.verdict, outcome.error) == (Verdict.HOLDS, None), outcome
        assert outcome.num_compared >= 3


@pytest.mark.parametrize("far", [25.0, -25.0])
@pytest.mark.parametrize("case", OPTIONS)
def test_log_ratios_beyond_the_limit_have_no_gradient(case, far):
    """The trainer clamps them to 20 nats, which a right run reaches: by a large rate over epochs, a far reference."""
    trace = traced(case, OPTIONS[case], far=far)
    outcome = run_check(REGISTRY["LSS004"], trace)
    assert (outcome.verdict, outcome.error) == (Verdict.HOLDS, None), outcome


def test_a_gradient_beyond_the_limit_is_a_violation(monkeypatch):
    monkeypatch.setattr("verifier.algorithms.losses.bounded", lambda value: value)
    outcome = run_check(REGISTRY["LSS004"], traced("importance", OPTIONS["importance"], far=-25.0))
    assert outcome.verdict is Verdict.VIOLATED


@pytest.mark.parametrize("case", CHANGES)
def test_an_option_that_is_not_applied_is_a_violation(case):
    outcome = run_check(REGISTRY["LSS004"], traced(case, dataclasses.replace(OPTIONS[case], **CHANGES[case])))
    assert outcome.verdict is Verdict.VIOLATED, outcome


def test_a_gradient_of_another_length_is_a_violation():
    outcome = run_check(REGISTRY["LSS004"], traced("clipped", OPTIONS["clipped"], scale=0.5))
    assert outcome.verdict is Verdict.VIOLATED
    assert "gradient" in outcome.finding.first.what


@pytest.mark.parametrize(("frozen", "begun", "bad"), [(5, 5, 0), (5, None, 0), (5, 6, 1), (6, 6, 1), (6, 5, 2)])
def test_a_reference_holds_what_the_run_began_with(frozen, begun, bad):
    shard = ReferenceShard(
        name="decoder.weight (chunk 0)", version=1, digest=f"vd1:{5:032x}", dtype="float32", shape=(4, 2),
        frozen=f"vd1:{frozen:032x}", begun=None if begun is None else f"vd1:{begun:032x}",
    )  # fmt: skip
    finding = run_check(REGISTRY["LGP010"], Trace(Manifest(), [shard], {}.__getitem__)).finding
    assert (0 if finding is None else finding.count) == bad
