"""TRL's `GRPOTrainer`, recorded by `verifier.probe`: it holds under its settings, and planted bugs are caught.

What this does not exercise: TRL with vLLM, several processes, GPUs, tools, multimodal prompts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, render_text, report_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl: ci/locks/trl.txt"),
]
EXAMPLES = ROOT / "docs" / "examples"
SMALL = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"max_steps": 3},
    "beta": {"beta": 0.05},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "two steps a generation": {"steps_per_generation": 4, "max_steps": 4},
    "grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "scaled by the batch": {"scale_rewards": "batch"},
    "hotter": {"temperature": 1.3, "mask_truncated_completions": True},
}
"""Settings of GRPOConfig beside `SMALL`, but for the defaults."""
HELD = {
    "ADV002", "ADV003", "CFG001", "DAT004", "DAT008", "LGP001", "LSS001", "LSS002", "TRN001", "TRN002", "TRN005",
    "TRN006", "WGT004", "WGT006",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("add", tmp_path_factory.mktemp("trl") / "checkpoint")


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Iterator[Oracle]:
    with Oracle(checkpoint, 120.0) as running:
        yield running


@pytest.fixture
def run(checkpoint: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Train by the example, with planted faults where some are; the report."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.set_num_threads(1)

    def judged(plant: Callable[[Any], None] | None = None, **settings: Any) -> Report:
        import trl_grpo

        monkeypatch.setattr(trl_grpo, "Recorded", type("Planted", (trl_grpo.Recorded,), {}))
        if plant is not None:
            plant(monkeypatch)
        trl_grpo.train(checkpoint, tmp_path / "trace", **settings)
        add_oracle(tmp_path / "trace", checkpoint, oracle)
        return report_of(read(tmp_path / "trace"), "trace")

    return judged


@pytest.mark.parametrize("name", SETTINGS)
def test_a_right_run_holds(name: str, run: Callable[..., Report]) -> None:
    report = run(**({} if name == "defaults" else {"max_steps": 2, **SMALL}) | SETTINGS[name])
    assert report.verdict is Verdict.HOLDS, render_text(report)
    cut = {"ADV002"} if "steps_per_generation" in SETTINGS[name] else set()  # groups span two steps
    assert {item.code for item in report.outcomes} == HELD - cut


def before_loss(change: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any], None]:
    """A bug in what TRL's loss reads, after it was handed over."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from trl import GRPOTrainer

        real = GRPOTrainer._compute_loss

        def wrong(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
            inputs = dict(inputs)
            change(self, inputs)
            return real(self, model, inputs)

        patch.setattr(GRPOTrainer, "_compute_loss", wrong)

    return plant


def after_scoring(change: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any], None]:
    """A bug in the batch that TRL makes of its samples."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from trl import GRPOTrainer

        real = GRPOTrainer._generate_and_score_completions

        def wrong(self: Any, inputs: Any) -> Any:
            found = real(self, inputs)
            change(self, found)
            return found

        patch.setattr(GRPOTrainer, "_generate_and_score_completions", wrong)

    return plant


def rolled(*names: str) -> Callable[[Any, dict[str, Any]], None]:
    return lambda _, batch: batch.update({name: batch[name].roll(1, 0) for name in names})


def mask_early(_: Any, batch: dict[str, Any]) -> None:
    mask = batch["completion_mask"].clone()
    mask[torch.arange(len(mask)), mask.sum(1) - 1] = 0
    batch["completion_mask"] = mask


def other_loss(name: str) -> Callable[[Any], None]:
    """The loss has the mean of another type than the config says."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from trl import GRPOTrainer

        real = GRPOTrainer._compute_loss

        def wrong(self: Any, model: Any, inputs: Any) -> Any:
            said, self.loss_type = self.loss_type, name
            try:
                return real(self, model, inputs)
            finally:
                self.loss_type = said

        patch.setattr(GRPOTrainer, "_compute_loss", wrong)

    return plant


def gradient_lost(patch: pytest.MonkeyPatch) -> None:
    from trl import GRPOTrainer

    real = GRPOTrainer.training_step

    def wrong(self: Any, model: Any, *args: Any) -> Any:
        if self._step % 2:
            model.zero_grad()
        return real(self, model, *args)

    patch.setattr(GRPOTrainer, "training_step", wrong)


def rewards_rolled(patch: pytest.MonkeyPatch) -> None:
    """Advantages are of another completion's reward than the reward function gave it."""
    import trl_grpo

    real = trl_grpo.Recorded._calculate_rewards
    patch.setattr(trl_grpo.Recorded, "_calculate_rewards", lambda self, *args: real(self, *args).roll(1, 0))


def not_clipped(patch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    def wrong(self: Any, model: Any) -> Any:
        return torch.nn.utils.get_total_norm([item.grad for item in model.parameters() if item.grad is not None])

    patch.setattr(Trainer, "_clip_grad_norm", wrong)


def tensor_not_stepped(patch: pytest.MonkeyPatch) -> None:
    import accelerate.optimizer

    real = accelerate.optimizer.AcceleratedOptimizer.step

    def wrong(self: Any, *args: Any) -> Any:
        max(
            (item for group in self.param_groups for item in group["params"]), key=lambda item: item.numel()
        ).grad = None
        return real(self, *args)

    patch.setattr(accelerate.optimizer.AcceleratedOptimizer, "step", wrong)


def std_of_n(patch: pytest.MonkeyPatch) -> None:
    from trl.trainer import grpo_trainer

    patch.setattr(
        grpo_trainer, "nanstd", lambda values, dim=None, **_: values.std(dim=dim, correction=0)
    )  # fmt: skip


PLANTED: dict[str, tuple[Callable[[Any], None], Stage, str, dict[str, Any]]] = {
    "old log-probabilities of another row": (
        after_scoring(rolled("old_per_token_logps")), Stage.LOGPROB, "LGP001", {"num_iterations": 2},
    ),
    "old log-probabilities of another row in the loss": (
        before_loss(rolled("old_per_token_logps")), Stage.LOSS, "LSS001", {"num_iterations": 2},
    ),
    "completion mask off by one": (after_scoring(mask_early), Stage.LOGPROB, "LGP001", {}),  # attention is by this mask
    "completion mask off by one in the loss": (before_loss(mask_early), Stage.LOGPROB, "LGP001", {}),
    "advantages shifted by a row": (after_scoring(rolled("advantages")), Stage.ADVANTAGE, "ADV002", {}),
    "advantages shifted by a row in the loss": (before_loss(rolled("advantages")), Stage.LOSS, "LSS001", {}),
    "deviation of n terms": (std_of_n, Stage.ADVANTAGE, "ADV002", {}),
    "mean of another loss type": (other_loss("bnpo"), Stage.LOSS, "LSS001", {}),
    "loss of dr_grpo for grpo": (other_loss("dr_grpo"), Stage.LOSS, "LSS001", {"loss_type": "grpo"}),
    "gradient of a micro-batch lost": (gradient_lost, Stage.LOSS, "LSS001", {}),
    "rewards of another completion": (rewards_rolled, Stage.ADVANTAGE, "ADV002", {}),
    "norm reported, not clipped": (not_clipped, Stage.TRAIN, "TRN005", {"max_grad_norm": 0.01}),
    "one tensor not stepped": (tensor_not_stepped, Stage.TRAIN, "TRN005", {}),
    "reference log-probabilities of another row": (
        before_loss(rolled("ref_per_token_logps")), Stage.LOSS, "LSS001", {"beta": 0.5},
    ),
}  # fmt: skip
"""Bug -> how it is planted, first bad stage, a check that sees it there, settings."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, run: Callable[..., Report]) -> None:
    plant, stage, code, settings = PLANTED[name]
    report = run(plant, **{"max_steps": 2, **SMALL, **settings})
    assert report.violated, render_text(report)
    first = report.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is stage, render_text(report)
    assert code in [item.code for item in report.violated]
    assert not [item.code for item in report.outcomes if item.error]
