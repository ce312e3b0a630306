"""Probes of a trainer's tokens and steps: rollouts, log-probabilities, what a step reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from verifier.core.record import Probe, real
from verifier.core.records_logprobs import ReturnedLogprobs, TrainerLogprobs
from verifier.core.records_tokens import Rollouts
from verifier.core.records_weights import StepReport
from verifier.data.rollout import Rollout

if TYPE_CHECKING:
    import torch

    from verifier.train.step_megatron import StepResult


def rollouts_of(name: str, version: int, rollouts: Sequence[Rollout]) -> tuple[Rollouts, dict[str, np.ndarray]]:
    """The record of a pass's rollouts, and its arrays.

    Args:
        name: of the pass, such as "scored" or "trained".
        version: weight version.
        rollouts: in the order in which the pass gets them.
    """
    record = Rollouts(
        name=name, version=version, ids=tuple(item.id for item in rollouts),
        groups=tuple(item.group for item in rollouts), lengths=tuple(len(item) for item in rollouts),
        prompt_lengths=tuple(item.prompt_length for item in rollouts),
        rewards=tuple(float(item.reward) for item in rollouts),
    )  # fmt: skip
    fields = ("tokens", "sampled", "mask", "roles", "logprobs", "versions")
    return record, {field: np.concatenate([getattr(item, field) for item in rollouts]) for field in fields}


def record_rollouts(probe: Probe, name: str, version: int, rollouts: Sequence[Rollout]) -> None:
    """Record the rollouts of a pass; see `rollouts_of`."""
    record, arrays = rollouts_of(name, version, rollouts)
    probe.emit(record, arrays)


def record_scored(
    probe: Probe, name: str, version: int, scored: Sequence[torch.Tensor], temperature: float = 1.0, *, whole: bool
) -> None:
    """Log-probabilities that one rank got back, nats.

    Args:
        probe: this rank's recorder.
        name: of the pass.
        version: of the weights.
        scored: one vector a rollout.
        temperature: divisor of the logits.
        whole: record the values too, as one rank has to.
    """
    import torch

    from verifier.plan.digest import digest_tensor

    values = torch.cat(list(scored))
    probe.emit(ReturnedLogprobs(name=name, version=version, digest=digest_tensor(values)))
    if whole:
        lengths = tuple(row.numel() for row in scored)
        probe.emit(TrainerLogprobs(name=name, version=version, lengths=lengths, temperature=temperature), values)


def record_step(probe: Probe, version: int, result: StepResult) -> None:
    """Record what one rank's training step reported."""
    probe.emit(
        StepReport(
            name="step", version=version, loss=real(result.loss), num_tokens=result.num_tokens,
            grad_norm=real(result.grad_norm),
        )
    )  # fmt: skip
