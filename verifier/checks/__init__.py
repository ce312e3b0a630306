"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import adapter, engine, logprob, moves, packing, routes, sampling, step, transfer, weights

__all__ = ["adapter", "engine", "logprob", "moves", "packing", "routes", "sampling", "step", "transfer", "weights"]
