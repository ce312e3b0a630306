"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import (
    adam_audit,
    adapter_delivery,
    answer_ends,
    arguments,
    batch_content,
    batch_sizes,
    beginnings,
    configs,
    delivery,
    draws,
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
    "adam_audit", "adapter_delivery", "answer_ends", "arguments", "batch_content", "batch_sizes", "beginnings",
    "configs", "delivery", "draws", "engine_mismatch", "final_export", "knobs", "logprobs", "loss_rows", "moves",
    "packing", "policy_step", "resume", "reward_penalty", "rollout_texts", "routes", "samples", "score_bias", "step",
    "training_step", "turns", "weights",
]  # fmt: skip
