"""The checks. Importing this package fills the registry in `verifier.core.check`."""

from verifier.checks import engine, logprob, transfer, weights

__all__ = ["engine", "logprob", "transfer", "weights"]
