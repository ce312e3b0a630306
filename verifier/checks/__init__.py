"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import (
    adam_audit,
    adapter_delivery,
    arguments,
    batch_content,
    beginnings,
    configs,
    delivery,
    engine_mismatch,
    final_export,
    knobs,
    logprobs,
    loss_rows,
    moves,
    packing,
    policy_step,
    resume,
    reward_penalty,
    rollout_texts,
    routes,
    samples,
    score_bias,
    step,
    training_step,
    turns,
    weights,
)

__all__ = [
    "adam_audit", "adapter_delivery", "arguments", "batch_content", "beginnings", "configs", "delivery",
    "engine_mismatch", "final_export", "knobs", "logprobs", "loss_rows", "moves", "packing", "policy_step", "resume",
    "reward_penalty", "rollout_texts", "routes", "samples", "score_bias", "step", "training_step", "turns",
    "weights",
]  # fmt: skip
