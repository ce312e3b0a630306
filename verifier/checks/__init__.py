"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import (
    configs,
    delivery,
    logprobs,
    moves,
    packing,
    policy_step,
    routes,
    samples,
    step,
    training_step,
    weights,
)

__all__ = [
    "configs", "delivery", "logprobs", "moves", "packing", "policy_step", "routes", "samples", "step",
    "training_step", "weights",
]  # fmt: skip
