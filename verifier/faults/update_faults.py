"""Bugs of a policy update that leave its record right: terms without gradient, options that are not read, versions."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault

SAMPLED = ("algorithm=grpo", "verify.every=1")
ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "stage": Stage.LOSS, "caught_by": ("LSS001",)}
LOSS_OF_ROWS = "verifier.train.policy_loss_megatron:token_loss(name, inputs, options)"
LIVE = (
    *SAMPLED, "data.rollouts=null", "engine.kind=hf", "data.batch_size=2", "grpo.max_answer_tokens=8",
)  # fmt: skip


@fault(
    "allenai/open-instruct#530", "verifier.algorithms.losses:kl_estimate(current, reference, kind)",
    **ROW, training=(*SAMPLED, "grpo.kl_weight=0.5"),
)  # fmt: skip
def kl_loss_detached(call: Call) -> Any:
    """The KL term of the loss is computed without a gradient: it is reported, and holds nothing back."""
    return call.faulty(current=call.current.detach())


@fault("huggingface/trl#6140", LOSS_OF_ROWS, **ROW, training=(*SAMPLED, "grpo.entropy_weight=0.05"))
def entropy_detached(call: Call) -> Any:
    """The entropy that the loss is lowered by has no gradient: the loss has it, no weight moves for it."""
    return call.faulty(inputs=dataclasses.replace(call.inputs, entropy_T=call.inputs.entropy_T.detach()))


@fault(
    "RLinf/RLinf#316", LOSS_OF_ROWS,
    **{**ROW, "caught_by": ("LSS001", "LSS002")}, training=(*SAMPLED, "grpo.dual_clip=1.001", "grpo.epochs=2"),
)  # fmt: skip
def dual_clip_unread(call: Call) -> Any:
    """The loss takes any options, calls the dual clip by another name, and never reads the one that is given."""
    return call.faulty(options=dataclasses.replace(call.options, dual_clip=None))


@fault(
    "NVIDIA-NeMo/RL#316",
    "verifier.train.step_megatron:vocab_parallel_logprob("
    "logits_TV, labels_T, vocab_start, vocab_size, group, temperature, chunk_tokens, entropy)",
    **{**ROW, "stage": Stage.LOGPROB, "caught_by": ("LGP001",)}, training=(*SAMPLED, "grpo.temperature=0.7"),
)  # fmt: skip
def temperature_left_out_of_training(call: Call) -> Any:
    """The trainer divides no logits by the temperature, when it scores and when it trains: its ratios are 1."""
    return call.faulty(temperature=1.0)


@fault(
    "rllm-org/rllm#622", "verifier.trainer.generation:EngineRollouts.rollouts(self, step, probe)",
    **{**ROW, "stage": Stage.ROLLOUT, "caught_by": ("LGP003",)}, side=Side.CONTROLLER, training=LIVE,
)  # fmt: skip
def version_stamped_after_sync(call: Call) -> Any:
    """Rollouts that are sampled before a sync get the version that the engine has after it."""
    found = call.original()
    if call.probe is not None and "ahead" in call.state:
        return call.wrong(call.state["ahead"])
    return found


@version_stamped_after_sync.also("verifier.trainer.controller:Trainer._sync(self, version, trace)")
def _sample_ahead(call: Call) -> Any:
    call.state["ahead"] = call.self._rollouts.rollouts(call.version + 1, None)
    return call.original()
