"""Recomputation of activations that a single step asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verifier.model.provider_megatron import TrainerModel


@contextlib.contextmanager
def recomputed(trainer: TrainerModel, *, on: bool) -> Iterator[None]:
    """If `on`, keep only the input of every second layer in training steps and recompute the other activations.

    Source:
        megatron-core 0.19.2, core/transformer/transformer_block.py, `TransformerBlock.forward`, and
        core/models/hybrid/hybrid_block.py: both ask the configuration in every pass.
    """
    before = trainer.provider.recompute_granularity
    trainer.provider.recompute_granularity = "full" if on else before
    try:
        yield
    finally:
        trainer.provider.recompute_granularity = before
