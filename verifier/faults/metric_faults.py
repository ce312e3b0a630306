"""Bugs of the numbers that a training step shows: what they are a mean of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "caught_by": ("MET001",)}


@fault(
    "modelscope/ms-swift#5619", "verifier.trainer.grpo_plan:_facts(config, step, rows, given, reasons, old)",
    stage=Stage.REWARD, side=Side.CONTROLLER, training=("algorithm=grpo", "grpo.drop_overlong=true"), **ROW,
)  # fmt: skip
def reward_of_what_stays(call: Call) -> Any:
    """The mean reward that is shown is one over the answers that stay in the loss."""
    kept = [row for row, reason in zip(call.rows, call.reasons, strict=True) if reason is None]
    return call.faulty(rows=kept) if 0 < len(kept) < len(call.rows) else call.original()


@fault(
    "huggingface/trl#3032", "verifier.train.policy_loss_megatron:loss_metrics(name, inputs, options)",
    stage=Stage.LOSS, training=("algorithm=grpo", "grpo.epochs=2", "grpo.clip_low=1e-3", "grpo.clip_high=1e-3"), **ROW,
)  # fmt: skip
def clipped_share_of_one_side(call: Call) -> Any:
    """The share of clipped tokens counts ratios below the lower bound alone."""
    return call.faulty(options=replace(call.options, clip_high=1e9))


@fault(
    "DLR-RM/stable-baselines3#149", "verifier.trainer.loop:_mean_of(reports)", stage=Stage.LOSS, side=Side.CONTROLLER,
    training=("algorithm=grpo", "grpo.mini_batches=2"), **ROW,
)  # fmt: skip
def metrics_of_the_last_update(call: Call) -> Any:
    """A step of several updates shows the numbers of the last one."""
    return call.wrong(dict(call.reports[-1])) if len(call.reports) > 1 else call.original()
