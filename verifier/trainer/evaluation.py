"""Answers of an evaluation, a few of which stand beside the trainer's scores of them in the trace that comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verifier.core.record import Probe
from verifier.core.records_policy import EvaluatedAnswers
from verifier.data.recorded import RolloutRow, rollout_of
from verifier.data.rollout_file import save_rollouts
from verifier.trainer.batches import Score

PROBLEMS = 8
"""Problems of an evaluation, at most, whose two answers are scored by the trainer: three passes of some 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Answers of an evaluation to the problems of `places`."""

    version: int
    """Of the weights that were evaluated, as the metrics have it."""
    sampled: Sequence[RolloutRow]
    greedy: Sequence[RolloutRow]


def places(version: int, count: int) -> list[int]:
    """Places of the problems whose answers are kept, spread over all of them, and others at each evaluation."""
    kept = min(PROBLEMS, count)
    return sorted((version + at * count // kept) % count for at in range(kept))


def record_answers(
    probe: Probe, answered: Answered, version: int, temperature: float, score: Score, file: Path
) -> None:  # fmt: skip
    """Score answers by the live weights, and record both sides.

    Args:
        probe: recorder of a trace.
        answered: of the last evaluation.
        version: of the live weights.
        temperature: of the answers that are not greedy.
        score: by the ranks.
        file: for a batch of each kind, which is removed again.
    """
    parts: list[tuple[np.ndarray, ...]] = []

    def add(rows: Sequence[RolloutRow], which: Sequence[str]) -> None:
        rollouts = [rollout_of(row) for row in rows]
        save_rollouts(file, rollouts)
        columns = [np.concatenate(score(file, each)) for each in which]
        file.unlink()
        given = (np.concatenate([getattr(item, name) for item in rollouts]) for name in ("mask", "logprobs"))
        parts.append((*given, columns[0], columns[1] if len(columns) > 1 else np.full(len(columns[0]), np.nan)))

    add(answered.sampled, ("current",))
    add(answered.greedy, ("greedy", "shortfall"))
    rows = [*answered.sampled, *answered.greedy]
    mask, engine, trainer, shortfall = (np.concatenate(column) for column in zip(*parts, strict=True))
    record = EvaluatedAnswers(
        name="held-out problems", version=version, claimed=answered.version, temperature=temperature,
        ids=tuple(row.id for row in rows), lengths=tuple(len(row.tokens) for row in rows),
        greedy=(False,) * len(answered.sampled) + (True,) * len(answered.greedy),
    )  # fmt: skip
    arrays = {"engine": engine, "trainer": trainer, "shortfall": shortfall}
    probe.emit(record, {"mask": mask, **{name: item.astype(np.float32) for name, item in arrays.items()}})


Examine = Callable[[Probe | None, int], bool]
"""Records the answers of the last evaluation beside the scores of a version; True if there were any."""
