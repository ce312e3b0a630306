"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import (
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
    knobs,
    logprobs,
    loss_rows,
    moves,
    packing,
    policy_step,
    resume,
    routes,
    samples,
    score_bias,
    step,
    training_step,
    turns,
    weights,
)

__all__ = [
    "adapter_delivery", "answer_ends", "arguments", "batch_content", "batch_sizes", "beginnings", "configs", "delivery",
    "draws", "engine_mismatch", "knobs", "logprobs", "loss_rows", "moves", "packing", "policy_step", "resume", "routes",
    "samples", "score_bias", "step", "training_step", "turns", "weights",
]  # fmt: skip
