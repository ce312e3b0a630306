"""Bugs of a training run's loss: terms, signs, clips and divisors, in the value or in the gradient alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault, kind
from verifier.mesh import Mesh

LOSS = "verifier.train.policy_loss_megatron"
ROW: dict[str, Any] = {
    "stage": Stage.LOSS, "caught_by": ("LSS004",), "engine": TRAINING, "model": "tiny:add",
}  # fmt: skip
CLIPPED = ("algorithm=grpo", "grpo.epochs=2", "grpo.clip_low=0.001", "grpo.clip_high=0.002")


@kind(f"{LOSS}:token_loss(name, inputs, options)", **ROW)
def on_losses(body: Callable[[Call], Any], call: Call) -> Any:
    """Compute the loss of each token wrongly."""
    call.fire()
    return body(call)


@on_losses("rllm-org/rllm#81", training=CLIPPED, mesh=Mesh(dp=2))
def clip_computed_and_not_used(call: Call) -> Any:
    """The clipped term is computed, and the loss that is averaged is the one without it."""
    return call.original(name="importance")


@on_losses("inclusionAI/AReno#68", training=CLIPPED)
def ratio_of_a_policy_to_itself(call: Call) -> Any:
    """The ratio divides by the current log-probability, detached: it is always 1, and no clip ever binds."""
    return call.original(inputs=replace(call.inputs, divisor_T=call.inputs.current_T.detach()))


@fault(
    "agentscope-ai/Trinity-RFT#154 (found in review)", f"{LOSS}:_sequence_mean(values_T, mask_T, shard)",
    **ROW, mesh=Mesh(cp=2), training=("algorithm=grpo", "grpo.loss=gspo", "grpo.epochs=2"),
)  # fmt: skip
def sequence_mean_of_a_shard(call: Call) -> Any:
    """A sequence's ratio is the mean over the tokens of one context-parallel shard, not of the sequence."""
    return call.faulty(shard=replace(call.shard, alignment=replace(call.shard.alignment, cp=1)))
