"""What SkyRL has: means of KL and entropy apart from the loss's, and weights that are sent in another dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from verifier import probe
from verifier.core.store import read
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.report import render_text, report_of

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("add", tmp_path_factory.mktemp("skyrl"))


def truncated(tensor: torch.Tensor) -> torch.Tensor:
    """Towards zero, which is no rounding of a library."""
    return (tensor.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@pytest.mark.parametrize(
    ("sends", "live", "sent", "wrong"),
    [
        ("bfloat16", BFLOAT16, "rounded", set()),
        ("bfloat16", FLOAT32, "rounded", set()),
        ("", BFLOAT16, "rounded", {"WGT004", "PLN002"}),
        ("", FLOAT32, "rounded", {"WGT004", "WGT005", "PLN002"}),
        ("bfloat16", FLOAT32, "truncated", {"WGT004", "WGT005"}),
        ("bfloat16", FLOAT32, "twice", {"WGT004", "WGT005"}),
        ("bfloat16", FLOAT32, "kept", {"WGT004", "WGT005", "PLN002"}),
    ],
)
def test_weights_are_sent_as_the_loop_rounds_them(
    sends: str, live: torch.dtype, sent: str, wrong: set[str], checkpoint: Path, tmp_path: Path
) -> None:
    path, source = tmp_path / "trace", open_checkpoint(checkpoint)
    held = {name: source.read(name).to(live) for name in source.names()}
    made = {
        "rounded": lambda tensor: tensor.bfloat16(), "truncated": truncated, "kept": lambda tensor: tensor,
        "twice": lambda tensor: tensor.half().bfloat16(),
    }[sent]  # fmt: skip
    with probe.open(path, model=checkpoint, dtype="bfloat16", sends=sends) as record, probe.attach(path) as engine:
        record.weights_held(held, 0, after="load")
        for version in (0, 1):
            held = {name: tensor + version for name, tensor in held.items()}
            engine.weights_received(
                record.sending({name: made(tensor) for name, tensor in held.items()}, version, live=held), version
            )
    report = report_of(read(path), str(path))
    assert {item.code for item in report.violated} == wrong, render_text(report)
    assert {item.code for item in report.outcomes} >= {"WGT001", "WGT004", "WGT005", "PLN002"}


@pytest.mark.parametrize(("wrong", "caught"), [(1.0, set()), (1.5, {"LSS004"})])
def test_kl_and_entropy_may_have_a_mean_of_their_own(wrong: float, caught: set[str], tmp_path: Path) -> None:
    """The policy's is over tokens, multiplied into advantages, that of the KL over sequences."""
    path, masks = tmp_path / "trace", torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    with probe.open(path, dtype="float32") as record:
        record.rollouts(
            1, prompts=[[3], [4]], responses=[[5, 6, 7], [8]], loss_mask=[[1, 1, 1], [1]], versions=0, ids=[0, 1],
            rewards=[1.0, 0.0], groups=[0, 0], engine_logprobs=[[-1.0] * 3, [-1.0]],
        )  # fmt: skip
        record.trainer_logprobs(1, [[-1.0] * 3, [-1.0]], reference=[[-1.5] * 3, [-0.5]])
        record.advantages(1, [0.5, -0.5], estimator="dr_grpo", dtype="float32")
        shares = torch.tensor([4 / 6, 2.0])  # 1 / (2 sequences, 3 tokens or 1) over 1 / 4 tokens
        told = {"kl": shares.tolist(), "entropy": [2.0, 2.0]}
        record.loss(1, "clipped", kl_weight=0.1, kl_kind="k2", entropy_weight=0.01, shares=told)
        logprob = torch.full((2, 3), -1.0, requires_grad=True)
        entropy = torch.full((2, 3), 2.0, requires_grad=True)
        reference, scaled = torch.tensor([[-1.5] * 3, [-0.5] * 3]), torch.tensor([[0.5], [-0.5]]) / 4
        policy, kl = -(logprob + 1.0).exp() * scaled, (logprob - reference).square() / 2
        record.token_losses(
            1, logprob, [(torch.full((2, 1), 4.0), policy), (0.1 * shares[:, None], kl), (-0.01 * 2, entropy)],
            ids=[0, 1], mask=masks, entropies=entropy, advantages=4 * scaled, reference=reference,
        )  # fmt: skip
        mean = wrong * ((kl * masks).sum(1) / masks.sum(1)).mean()
        ((policy * masks).sum() + 0.1 * mean - 0.01 * 2 * (entropy * masks).sum() / 4).backward()
        record.step(1, loss=-0.25 * 0.5 + 0.1 * 0.125 - 0.04, num_tokens=4, grad_norm=1.0)
    report = report_of(read(path), str(path))
    assert {item.code for item in report.violated} == caught, render_text(report)
    assert {item.code for item in report.outcomes} >= {"ADV001", "LSS004"}
