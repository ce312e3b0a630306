"""Sentence of a training run whose memory has run out: the peak, the knobs that lower it, and the sweep to run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.platform import Tier
from verifier.train.memory import is_out_of_memory, peaks


@contextlib.contextmanager
def refused_for_memory(config: TrainConfig, tier: Tier, rank: int, call: str) -> Iterator[None]:
    """Turn an error for want of memory into one sentence.

    Raises:
        UsageError: memory has run out in the body.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as problem:  # torch's OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(f"{type(problem).__name__}: {problem}"):
            raise
        raise UsageError(
            f"rank {rank} ran out of memory in `{call}`, its peak is {peaks(tier).text()}: {_knobs(config)}; "
            f"`verifier sweep --model {config.model} --ranks {config.mesh.world_size}` finds the largest budget"
        ) from problem


def _knobs(config: TrainConfig) -> str:
    """Advice: the knobs of a step's memory that are not at their least yet."""
    batch, options = config.batch, config.megatron
    if batch.max_tokens is not None:
        advice = [f"lower batch.max_tokens, {batch.max_tokens:,}"]
    else:
        advice = [f"lower batch.micro_batch_size, {batch.count}"] if batch.count > 1 else []
    if options.recompute != "full":
        advice.append(f"set megatron.recompute=full in place of {options.recompute}")
    return ", ".join([*advice, "or raise mesh.tp, mesh.pp or mesh.cp"])
