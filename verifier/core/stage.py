"""The rooms, in the order in which data visits them within one weight version."""

from __future__ import annotations

import enum


class Stage(enum.IntEnum):
    """One room. The integer order is the data-flow order, so the first bad stage is a ``min``."""

    LOAD = 0
    """Checkpoint to live Megatron parameters, through Megatron-Bridge."""
    PACK = 1
    """Rollouts to packed, aligned, sharded micro-batches."""
    REPLAY = 2
    """Recorded expert routes to per-layer router indices."""
    LOGPROB = 3
    """Trainer forward and log-probabilities."""
    LOSS = 4
    """Loss and gradients."""
    TRAIN = 5
    """Optimizer step: master weights, replicas, the live parameters after it."""
    EXPORT = 6
    """Live parameters to checkpoint tensors, through Megatron-Bridge."""
    PLAN = 7
    """Order, names, dtypes, bytes of what will travel."""
    TRANSPORT = 8
    """Bytes from trainer to engine."""
    ENGINE = 9
    """Contents of the engine after loading: parameters, buffers, derived tensors."""
    ROLLOUT = 10
    """Log-probabilities that the engine computes with what it holds."""

    @property
    def label(self) -> str:
        """Lower-case name, as printed in reports and stored in traces."""
        return self.name.lower()
