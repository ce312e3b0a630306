"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import engine, logprob, packing, step, transfer, weights

__all__ = ["engine", "logprob", "packing", "step", "transfer", "weights"]
