"""One rollout of every eighth judged step, scored by itself: no other sample is in its pack, or can get its values.

It takes the way of all scoring passes, by the weights before the step's first update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.config.training import TrainConfig
from verifier.core.record import Probe
from verifier.data.rollout import PROMPT_VALUES, Rollout, save_rollouts
from verifier.model.families import num_experts_of
from verifier.runs.model_under_test import ModelUnderTest
from verifier.stages.logprob.records import SpotScore

if TYPE_CHECKING:
    from verifier.trainer.batches import Score


EVERY = 8
"""Steps between two that have such a rollout: each of its passes costs some 20 ms of a rank."""
MOST_WITHOUT_BEGINNING = 2
"""Tokens of a rollout that has no beginning with a token to score."""


def has_spot(step: int) -> bool:
    """Tell whether a rollout of the step is scored by itself: of the first, and then of every eighth."""
    return step % EVERY == 1


def why_no_spot(config: TrainConfig, model: ModelUnderTest) -> str:
    """Reason for which no rollout of a run is scored by itself; empty where one is."""
    if num_experts_of(model.checkpoint.config) and not config.grpo.replay_routes:
        return "routers that choose by themselves may choose otherwise where two experts are nearly as good"
    if config.megatron.use_fsdp:
        return "megatron.use_fsdp"
    if model.dtype == "float32":
        return "" if model.tier == "cpu" else "what a pack changes in fp32 on a GPU is not measured"
    live = config.algorithm == "grpo" and config.data.rollouts is None
    return "" if live or model.tier == "cpu" else f"no step measures the noise of {model.dtype} here"


def beginning_of(rollout: Rollout) -> Rollout:
    """A rollout without the second half of what follows its prompt: the token before the end of one, at least."""
    length = len(rollout) - max(1, rollout.response_length // 2)
    parts = {name: getattr(rollout, name)[:length] for name in ("tokens", *PROMPT_VALUES)}
    routes = None if rollout.routes is None else rollout.routes[:length]
    return replace(rollout, prompt_length=min(rollout.prompt_length, length), routes=routes, **parts)


def place_of(seed: int, step: int, parts: Sequence[Sequence[int]]) -> int:
    """Place of the rollout that a step scores by itself.

    Args:
        seed: of the run.
        step: from 1.
        parts: places of each mini-batch; the steps with a spot begin with the last and go round.
    """
    part = parts[-(step // EVERY + 1) % len(parts)]
    drawn = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    return part[int.from_bytes(drawn, "big") % len(part)]


def record_spot(
    probe: Probe, config: TrainConfig, step: int, rollouts: Sequence[Rollout], parts: Sequence[Sequence[int]],
    score: Score, file: Path,
) -> None:  # fmt: skip
    """Score one rollout of a step by itself, and record what the trainer says of it.

    Args:
        probe: recorder of the step's trace.
        config: of the run.
        step: from 1.
        rollouts: of the step, as they are scored.
        parts: places of each mini-batch.
        score: by the ranks.
        file: of a batch of the step, beside which this one is written and removed again.
    """
    rollout, alone = rollouts[place_of(config.seed, step, parts)], file.with_name("spot.safetensors")
    save_rollouts(alone, [rollout])
    sides = ("current", "reference") if config.algorithm == "grpo" and config.grpo.has_reference else ("current",)
    arrays = {which: score(alone, which)[0][1:] for which in sides}
    if len(rollout) > MOST_WITHOUT_BEGINNING:
        save_rollouts(alone, [beginning_of(rollout)])
        arrays["beginning"] = score(alone, "current")[0][1:]
    alone.unlink()
    record = SpotScore(
        name="spot", version=step, id=rollout.id, seed=config.seed, step=step, mini_batches=len(parts),
        temperature=1.0 if config.algorithm == "sft" else config.grpo.temperature,
    )  # fmt: skip
    probe.emit(record, arrays)
