"""Knobs of where metrics of a training run go."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.knob import check, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Places of a run's metrics beside metrics.jsonl and TensorBoard.

    Raises:
        UsageError: a value that its knob does not allow.
    """

    wandb: bool = knob("Write an offline run of wandb too, in the run's folder `wandb`.", False)

    def __post_init__(self) -> None:
        check(self)
