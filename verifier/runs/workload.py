"""Data that a session scores, samples and trains on: rollouts, prompts, objective, the optimizer's rule.

`verifier.runs.scenario` makes one up; a trainer's real batch has the same form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from verifier.data.recorded import RolloutRow
from verifier.data.rollout import NO_VERSION, Role, Rollout, make_rollout
from verifier.stages.loss.records import Objective
from verifier.stages.train.records import OptimizerRule

if TYPE_CHECKING:
    import torch

    from verifier.megatron.pack import PackedBatch
    from verifier.megatron.step_megatron import TokenLoss


class ScoringPass(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that the trainer scores together."""

    name: str
    rollouts: tuple[RolloutRow, ...]
    temperature: float = 1.0
    """Divisor of the logits."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of the engine, to be trained on; JSON there and back."""

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The engine's, nats."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it; JSON there and back."""

    passes: tuple[ScoringPass, ...]
    """The first is scored at every version, by trainer and engine; the others by the trainer, at version 0."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids to sample from."""
    batches: tuple[tuple[RolloutRow, ...], ...]
    """Rollouts of each training step, one batch per cycle."""
    micro_batch_size: int
    """Rollouts that are trained on together at the most."""
    objective: Objective
    rule: OptimizerRule


def with_answers(batch: Sequence[RolloutRow], answers: Sequence[Answer], version: int) -> tuple[RolloutRow, ...]:
    """The batch with answers that weights of `version` sampled in the place of its second rollout and those after it.

    They keep the group and the reward of the rollouts whose place they take.
    """
    rows = list(batch)
    for place, answer in zip(range(1, len(rows)), answers, strict=False):
        drawn = (True,) * len(answer.tokens)
        rows[place] = replace(
            rows[place], id=answer.id, prompt=answer.prompt, response=answer.tokens, sampled=drawn, mask=drawn,
            logprobs=answer.logprobs, versions=(version,) * len(drawn),
        )  # fmt: skip
    return tuple(rows)


def rollouts_of(rows: Sequence[RolloutRow]) -> list[Rollout]:
    """Rollouts as training takes them."""
    return [
        make_rollout(
            row.id, row.prompt, row.response, group=row.group, sampled=row.sampled, mask=row.mask,
            logprobs=row.logprobs, versions=row.versions, reward=row.reward,
        )
        for row in rows
    ]  # fmt: skip


def expected_rollouts(rows: Sequence[RolloutRow]) -> list[Rollout]:
    """The result that `rollouts_of` must have, put together token by token and by none of its code."""
    found = []
    for row in rows:
        given = [(Role.PROMPT, False, False, math.nan, NO_VERSION)] * len(row.prompt)
        answered = [
            (Role.ASSISTANT, True, kept, nats, weights) if drawn else (Role.TOOL, False, False, math.nan, NO_VERSION)
            for drawn, kept, nats, weights in zip(row.sampled, row.mask, row.logprobs, row.versions, strict=True)
        ]
        roles, drawn, kept, nats, weights = zip(*given, *answered, strict=True)
        found.append(
            Rollout(
                id=row.id, group=row.group, tokens=np.array(row.tokens, np.int64), prompt_length=len(row.prompt),
                sampled=np.array(drawn, np.bool_), mask=np.array(kept, np.bool_), roles=np.array(roles, np.int8),
                logprobs=np.array(nats, np.float32), versions=np.array(weights, np.int32), reward=row.reward,
            )
        )  # fmt: skip
    return found


def policy_loss(objective: Objective, version: int) -> TokenLoss:
    """The loss of `Objective` in the step that makes a version, per row of a micro-batch.

    Rows outside of the loss mask may hold anything; what is NaN there is taken out before it meets a gradient, since
    zero times NaN is NaN.
    """
    import torch

    def loss(logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
        device = logprob_T.device
        reward_T = torch.tensor([*shard.rewards, 0.0], dtype=logprob_T.dtype, device=device)[
            shard.segments_T.long().to(device)
        ]
        engine_T = torch.where(shard.loss_mask_T.cpu(), shard.engine_logprobs_T, 0).to(device)
        drift_T = logprob_T - engine_T
        regular_T = objective.drift_weight / 2 * drift_T.square() - objective.entropy_weight * entropy_T
        return (1.0 if version % 2 else objective.every_second) * (regular_T - reward_T * logprob_T)

    return loss
