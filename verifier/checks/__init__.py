"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import adapter, delivery, logprobs, moves, packing, routes, samples, step, synced_engine, weights

__all__ = [
    "adapter",
    "delivery",
    "logprobs",
    "moves",
    "packing",
    "routes",
    "samples",
    "step",
    "synced_engine",
    "weights",
]
