"""Tokens by the weights that sampled them: which of them one version alone made, so that its oracle can judge them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from verifier.config import TrainConfig
from verifier.data.rollout import Rollout
from verifier.engine.api import Sample


def exact_tokens(config: TrainConfig, rollout: Rollout) -> np.ndarray:
    """[L] bool, sampled tokens that read no keys and values of other weights than their own.

    Where requests keep keys and values at an update, the later tokens read those of the weights that came first.
    """
    if not config.grpo.keep_kv_cache or not rollout.sampled.any():
        return rollout.sampled
    return rollout.sampled & (rollout.versions == rollout.versions[rollout.sampled][0])


def fresh_tokens(config: TrainConfig, rollout: Rollout, version: int) -> np.ndarray:
    """[L] bool, tokens that a version sampled, and no other had a part in."""
    return exact_tokens(config, rollout) & (rollout.versions == version)


def has_fresh(config: TrainConfig, rollouts: Iterable[Rollout], version: int) -> bool:
    """Tell whether a token in the loss is of a version: trainer and engine then score it by the same weights."""
    return any(bool((fresh_tokens(config, item, version) & item.mask).any()) for item in rollouts)


def versions_of(sample: Sample, version: int) -> tuple[int, ...]:
    """Version of the weights that sampled each token, where the first were of `version`."""
    if not any(sample.updates):
        return (version,) * len(sample.tokens)
    return tuple(version + count for count in sample.updates)
