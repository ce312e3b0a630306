"""Log-probabilities of sampled tokens of which an engine gives no number: the end of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable

from verifier.config.training import TrainConfig
from verifier.core.stage import Stage
from verifier.data.recorded import RolloutRow
from verifier.launch.stack_failure import StackFailed, distribution


class LogprobLost(StackFailed):
    """The engine sampled a token, and its log-probability is NaN or infinite.

    Attributes:
        step: whose trace has the rollouts; 0 for an evaluation.
    """

    step: int = 0


def require_numbers(config: TrainConfig, rows: Iterable[RolloutRow], step: int = 0) -> None:
    """Refuse rollouts of an engine with a sampled token whose log-probability is not finite.

    Raises:
        LogprobLost: names the engine, its version, the rollout, the token and the version of its weights.
    """
    for row in rows:
        for at, (drawn, nats) in enumerate(zip(row.sampled, row.logprobs, strict=True)):
            if drawn and not math.isfinite(nats):
                package, version = distribution({"hf": "transformers"}.get(config.engine.kind, config.engine.kind))
                lost = LogprobLost.of(
                    name="the engine", package=package, package_version=version, at=Stage.ROLLOUT.label,
                    during=row.versions[at],
                    message=f"the engine's log-probability of answer token {at} of `{row.id}`, which version "
                    f"{row.versions[at]} sampled, is {nats}",
                )  # fmt: skip
                lost.step = step
                raise lost
