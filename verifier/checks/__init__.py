"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import adapter, logprobs, moves, packing, routes, sampling, step, synced_engine, transfer, weights

__all__ = [
    "adapter",
    "logprobs",
    "moves",
    "packing",
    "routes",
    "sampling",
    "step",
    "synced_engine",
    "transfer",
    "weights",
]
