"""Bugs of a training run's loss: terms, signs, clips and divisors, in the value or in the gradient alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault, kind
from verifier.mesh import Mesh

LOSS = "verifier.train.policy_loss_megatron"
STEP = "verifier.train.step_megatron"
ROW: dict[str, Any] = {
    "stage": Stage.LOSS, "caught_by": ("LSS004",), "engine": TRAINING, "model": "tiny:add",
}  # fmt: skip
CLIPPED = ("algorithm=grpo", "grpo.epochs=2", "grpo.clip_low=0.001", "grpo.clip_high=0.002")
KL = ("algorithm=grpo", "grpo.kl_weight=0.1")


@kind(f"{LOSS}:token_loss(name, inputs, options)", **ROW)
def on_losses(body: Callable[[Call], Any], call: Call) -> Any:
    """Compute the loss of each token wrongly."""
    call.fire()
    return body(call)


@on_losses("rllm-org/rllm#81", training=CLIPPED, mesh=Mesh(dp=2))
def clip_computed_and_not_used(call: Call) -> Any:
    """The clipped term is computed, and the loss that is averaged is the one without it."""
    return call.original(name="importance")


@on_losses("THUDM/slime#2247", training=(*CLIPPED, "grpo.dual_clip=1.001"))
def dual_clip_not_passed_on(call: Call) -> Any:
    """The bound of the ratio for negative advantages is read from the config and not handed to the loss."""
    return call.original(options=replace(call.options, dual_clip=None))


@on_losses("thu-ml/tianshou#433", training=("algorithm=grpo", "grpo.dual_clip=1.5"))
def dual_clip_of_good_answers(call: Call) -> Any:
    """The bound for negative advantages is applied to positive ones too, whose loss it makes larger."""
    import torch

    single_T = call.original(options=replace(call.options, dual_clip=None))
    bound_T = -call.options.dual_clip * call.inputs.advantage_T.to(single_T.dtype)
    return torch.where(call.inputs.mask_T, torch.minimum(single_T, bound_T), 0)


@on_losses("verl-project/verl#179", training=KL, mesh=Mesh(tp=2))
def kl_pushes_away(call: Call) -> Any:
    """The KL term has the wrong sign, and pushes the policy away from the reference."""
    without_T = call.original(options=replace(call.options, kl_weight=0.0))
    return 2 * without_T - call.original()


@on_losses("NovaSky-AI/SkyRL#1353", training=KL, mesh=Mesh(pp=2))
def kl_without_gradient(call: Call) -> Any:
    """The KL estimate is computed without gradients: it is reported, and holds nothing back."""
    without_T = call.original(options=replace(call.options, kl_weight=0.0))
    return without_T + (call.original() - without_T).detach()


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


SUM_LOSS = f"{STEP}:_sum_loss(logprob_T, entropy_T, shard, loss)"


@fault("areal-project/AReaL#1273", SUM_LOSS, **ROW)
def divided_by_micro_batches_again(call: Call) -> Any:
    """The loss, which the whole batch's tokens divide, is divided by the number of micro-batches once more."""
    total, num_tokens, report = call.faulty()
    return total / call.state.get("micro_batches", 1), num_tokens, report


@divided_by_micro_batches_again.also(f"{STEP}:_run(trainer, forward, shards, schedule_options)")
def _counted(call: Call) -> Any:
    call.state["micro_batches"] = len(call.shards)
    return call.original()


@fault("NovaSky-AI/SkyRL#1751", SUM_LOSS, **ROW, mesh=Mesh(cp=2))
def multiplied_by_context_parallel(call: Call) -> Any:
    """The loss is multiplied by the number of context-parallel ranks, as if the schedule averaged over them."""
    total, num_tokens, report = call.faulty()
    return total * call.shard.alignment.cp, num_tokens, report
