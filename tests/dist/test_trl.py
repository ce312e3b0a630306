"""TRL's GRPO, RLOO and SFT, recorded by `verifier.probe`: they hold under their settings, and planted bugs are caught.

What this does not exercise: TRL with vLLM, GPUs, tools, multimodal prompts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

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
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
SFT = {"script": "trl_sft"}
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
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "gspo": {**GSPO, "num_iterations": 2},
    "gspo and beta": {**GSPO, "beta": 0.05, "num_iterations": 2},
    "two-sided clip": {"delta": 1.5, "num_iterations": 2},
    "LoRA": {"peft": LORA, "beta": 0.05},
    "bf16 autocast": {"bf16": True, "dtype": "bfloat16"},
    "rloo": {"trainer": "rloo", "beta": 0.0, "num_iterations": 2},
    "rloo and beta": {"trainer": "rloo", "beta": 0.1},
    "sft": {**SFT, "gradient_accumulation_steps": 2},
    "sft packed": {**SFT, "packing": True, "gradient_accumulation_steps": 2},
    "sft without padding": {**SFT, "padding_free": True, "max_length": None},
    "sft of answers alone": {**SFT, "chat": True, "assistant_only_loss": True},
    "sft with LoRA": {**SFT, "peft": LORA},
    "sft in bf16 autocast": {**SFT, "bf16": True, "dtype": "bfloat16"},
}
"""Settings of the config beside `SMALL`, but for the defaults."""
HELD = {
    "ADV002", "ADV003", "CFG001", "DAT004", "DAT008", "LGP001", "LSS001", "LSS002", "TRN001", "TRN002", "TRN005",
    "TRN006", "WGT004", "WGT006",
}  # fmt: skip
OF_SAMPLES = {"ADV002", "ADV003", "DAT004", "DAT008", "LGP001"}
"""Checks of what SFT has none of."""


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

    def judged(plant: Callable[[Any], None] | None = None, script: str = "trl_grpo", **settings: Any) -> Report:
        example = importlib.import_module(script)
        monkeypatch.setattr(example, "Recorded", type("Planted", (example.Recorded,), {}))
        if plant is not None:
            plant(monkeypatch)
        example.train(checkpoint, tmp_path / "trace", **settings)
        add_oracle(tmp_path / "trace", checkpoint, oracle)
        return report_of(read(tmp_path / "trace"), "trace")

    return judged


@pytest.mark.parametrize("name", SETTINGS)
def test_a_right_run_holds(name: str, run: Callable[..., Report]) -> None:
    settings = SETTINGS[name]
    report = run(**(in_short(settings) if name != "defaults" else {}) | settings)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    cut = {"ADV002"} if "steps_per_generation" in settings else set()  # groups span two steps
    cut |= OF_SAMPLES if "script" in settings else set()
    more = {"WGT005", "WGT008", "WGT013", "WGT018"} if "peft" in settings else set()
    more |= {"LGP010"} if "beta" in settings and settings["beta"] and "peft" not in settings else set()
    more |= {"ADV004"} if "trainer" in settings and settings["beta"] else set()
    assert {item.code for item in report.outcomes} == HELD - cut | more


def in_short(settings: dict[str, Any]) -> dict[str, Any]:
    return {"max_steps": 2, **({} if "script" in settings else SMALL)}


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


def misread(trainer: str, name: str, value: Any) -> Callable[[Any], None]:
    """The loss reads another value of an attribute of the trainer, or of its config, than was asked for."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        import trl

        kind = getattr(trl, trainer)
        real = kind._compute_loss

        def wrong(self: Any, model: Any, inputs: Any) -> Any:
            holder = self if hasattr(self, name) else self.args
            said = getattr(holder, name)
            object.__setattr__(holder, name, value)
            try:
                return real(self, model, inputs)
            finally:
                object.__setattr__(holder, name, said)

        patch.setattr(kind, "_compute_loss", wrong)

    return plant


def sums_rolled(patch: pytest.MonkeyPatch) -> None:
    from trl import RLOOTrainer

    real = RLOOTrainer._compute_loss
    patch.setattr(
        RLOOTrainer,
        "_compute_loss",
        lambda self, model, inputs: real(self, model, {**inputs, "old_logps": inputs["old_logps"].roll(1, 0)}),
    )


def baseline_of_all(patch: pytest.MonkeyPatch) -> None:
    """RLOO's baseline is the mean of the whole group, a completion's own reward in it."""
    from trl import RLOOTrainer

    real = RLOOTrainer._generate_and_score_completions

    def wrong(self: Any, inputs: Any) -> Any:
        found = real(self, inputs)
        found["advantages"] = found["advantages"] * (1 - 1 / self.num_generations)
        return found

    patch.setattr(RLOOTrainer, "_generate_and_score_completions", wrong)


def penalty_added(patch: pytest.MonkeyPatch) -> None:
    """RLOO adds the KL penalty to the reward."""
    from trl import RLOOTrainer

    real = RLOOTrainer._generate_and_score_completions

    def wrong(self: Any, inputs: Any) -> Any:
        said, self.beta = self.beta, -self.beta
        try:
            return real(self, inputs)
        finally:
            self.beta = said

    patch.setattr(RLOOTrainer, "_generate_and_score_completions", wrong)


def reference_updated(patch: pytest.MonkeyPatch) -> None:
    """The reference follows the policy."""
    from trl import GRPOTrainer

    real = GRPOTrainer.training_step

    def wrong(self: Any, *args: Any) -> Any:
        with torch.no_grad():
            for frozen, own in zip(self.ref_model.parameters(), self.model.parameters(), strict=True):
                frozen.lerp_(own, 0.5)
        return real(self, *args)

    patch.setattr(GRPOTrainer, "training_step", wrong)


def scaled_twice(patch: pytest.MonkeyPatch) -> None:
    """What is merged into the weights has alpha over rank twice."""
    from peft.tuners.lora import LoraLayer, layer

    real = layer.Linear.get_delta_weight
    assert issubclass(layer.Linear, LoraLayer)
    patch.setattr(layer.Linear, "get_delta_weight", lambda self, name: real(self, name) * self.scaling[name])


def adapter_scaled_by_root(patch: pytest.MonkeyPatch) -> None:
    """The forward pass scales the adapter by the root of its rank."""
    from peft.tuners.lora import layer

    real = layer.Linear.update_layer

    def wrong(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        real(self, name, *args, **kwargs)
        self.scaling[name] *= self.r[name] ** 0.5

    patch.setattr(layer.Linear, "update_layer", wrong)


def before_sft(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    """A bug in what TRL's SFT loss reads, after it was handed over."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from trl import SFTTrainer

        real = SFTTrainer.compute_loss

        def wrong(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = dict(inputs)
            change(inputs)
            return real(self, model, inputs, *args, **kwargs)

        patch.setattr(SFTTrainer, "compute_loss", wrong)

    return plant


def labels_early(batch: dict[str, Any]) -> None:
    batch["labels"] = batch["labels"].roll(-1, -1)


def one_sequence(batch: dict[str, Any]) -> None:
    """Positions of a pack run on, so that sequences attend to those before them."""
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    for name in [name for name in batch if name.startswith(("cu_seq", "max_length"))]:
        del batch[name]


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """The mean over the tokens of each micro-batch, averaged."""
    from trl import SFTTrainer

    real = SFTTrainer.compute_loss

    def wrong(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return real(self, model, inputs, return_outputs) / self.current_gradient_accumulation_steps

    patch.setattr(SFTTrainer, "compute_loss", wrong)


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
    "cispo's greatest ratio misread": (
        misread("GRPOTrainer", "epsilon_high", 0.4), Stage.LOSS, "LSS001", {"loss_type": "cispo"},
    ),
    "clip range misread": (
        misread("GRPOTrainer", "epsilon_low", 0.0), Stage.LOSS, "LSS001", {"num_iterations": 2, "beta": 0.0},
    ),
    "sapo's temperature misread": (
        misread("GRPOTrainer", "loss_type", "grpo"), Stage.LOSS, "LSS001", {"loss_type": "sapo", "num_iterations": 2},
    ),
    "ratio of tokens for gspo's": (
        misread("GRPOTrainer", "importance_sampling_level", "token"), Stage.LOSS, "LSS001",
        {**GSPO, "num_iterations": 2},
    ),
    "reference follows the policy": (reference_updated, Stage.LOGPROB, "LGP010", {"beta": 0.5}),
    "adapter merged with its scaling twice": (scaled_twice, Stage.EXPORT, "WGT018", {"peft": LORA}),
    "adapter scaled by the root of its rank": (adapter_scaled_by_root, Stage.LOSS, "LSS001", {"peft": LORA}),
    "gradient of a micro-batch lost, with LoRA": (gradient_lost, Stage.LOSS, "LSS001", {"peft": LORA}),
    "advantages shifted by a row in the loss, in bf16": (
        before_loss(rolled("advantages")), Stage.LOSS, "LSS001", {"bf16": True, "dtype": "bfloat16"},
    ),
    "rloo's old log-probabilities of another row": (
        sums_rolled, Stage.LOSS, "LSS001", {"trainer": "rloo", "beta": 0.0},
    ),
    "rloo's baseline of all": (baseline_of_all, Stage.ADVANTAGE, "ADV002", {"trainer": "rloo", "beta": 0.0}),
    "rloo's penalty added": (penalty_added, Stage.ADVANTAGE, "ADV002", {"trainer": "rloo", "beta": 0.5}),
    "sft's labels off by one": (before_sft(labels_early), Stage.LOSS, "LSS001", SFT),
    "sft's mean of means": (mean_of_means, Stage.LOSS, "LSS001", {**SFT, "gradient_accumulation_steps": 2}),
    "sft's pack as one sequence": (before_sft(one_sequence), Stage.LOSS, "LSS001", {**SFT, "packing": True}),
    "sft's labels off by one, in bf16": (
        before_sft(labels_early), Stage.LOSS, "LSS001", {**SFT, "bf16": True, "dtype": "bfloat16"},
    ),
    "sft's gradient of a micro-batch lost, with LoRA": (
        mean_of_means, Stage.LOSS, "LSS001", {**SFT, "peft": LORA, "gradient_accumulation_steps": 2},
    ),
}  # fmt: skip
"""Bug -> how it is planted, first bad stage, a check that sees it there, settings."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_caught_in_its_stage(name: str, run: Callable[..., Report]) -> None:
    plant, stage, code, settings = PLANTED[name]
    report = run(plant, **in_short(settings) | settings)
    assert report.violated, render_text(report)
    first = report.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is stage, render_text(report)
    assert code in [item.code for item in report.violated]
    assert not [item.code for item in report.outcomes if item.error]


def in_two_processes(script: Path, checkpoint: Path, oracle: Oracle, trace: Path, **settings: Any) -> Report:
    asked = {"max_steps": 2, **SMALL, **settings}
    given = [f"{name}={value}" for name, value in asked.items() if value is not None]
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", *launch, str(script), str(checkpoint), str(trace), *given]
    subprocess.run(command, env=environment, check=True, timeout=300)
    add_oracle(trace, checkpoint, oracle)
    return report_of(read(trace), "trace")


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_two_processes_hold(loss_type: str, checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    report = in_two_processes(EXAMPLES / "trl_grpo.py", checkpoint, oracle, tmp_path / "trace", loss_type=loss_type)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} == HELD


def test_sft_in_two_processes_holds(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    script, settings = EXAMPLES / "trl_sft.py", {"num_generations": None, "gradient_accumulation_steps": 2}
    report = in_two_processes(script, checkpoint, oracle, trace, **settings)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} == HELD - OF_SAMPLES


def test_gradients_that_ranks_do_not_average_are_caught(checkpoint: Path, oracle: Oracle, tmp_path: Path) -> None:
    script = ROOT / "tests" / "dist" / "trl_not_averaged.py"
    report = in_two_processes(script, checkpoint, oracle, tmp_path / "trace")
    first = report.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is Stage.LOSS, render_text(report)
    assert "LSS001" in [item.code for item in report.violated]
