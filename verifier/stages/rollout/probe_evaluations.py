"""Answers of an evaluation beside the trainer's scores of them, in the trace that comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from verifier.core.record import Probe
from verifier.data.examples import Example
from verifier.data.recorded import rollout_of
from verifier.data.rollout import Rollout, load_rollouts, save_rollouts
from verifier.stages.data.probe_rollouts import record_tokens, turns_of
from verifier.stages.reward.records import GivenRewards
from verifier.stages.rollout.records import EvaluatedAnswers
from verifier.trainer.evaluation import Answered, ends_of, places
from verifier.trainer.observer import RunParts
from verifier.trainer.run_data import RunData

Examine = Callable[[Probe | None, int], bool]
"""Records answers of the last evaluation beside the scores of a version; tells whether there were any."""


def record_answers(probe: Probe, run: RunParts, answered: Answered, version: int) -> None:
    """Score answers by the live weights, in two passes or in three at another temperature than 1; record both sides."""
    assert run.data is not None
    data, options, score = run.data, run.config.grpo, run.score
    file, end = run.folder.path / "batches" / "evaluation.safetensors", data.tokenizer.eos_id
    temperature, other_ends = options.temperature, [
        item for item in ends_of(run.model.checkpoint, data.tokenizer) if item != end
    ]  # fmt: skip
    sampled, greedy = ([rollout_of(row) for row in rows] for rows in (answered.sampled, answered.greedy))

    def scored(rollouts: Sequence[Rollout], which: str) -> list[np.ndarray]:
        save_rollouts(file, rollouts)
        found = score(file, which)
        file.unlink()
        return found

    rows = [*answered.sampled, *answered.greedy]
    passes = [(sampled, "current"), (greedy, "greedy")] if temperature != 1 else [([*sampled, *greedy], "current")]
    arrays = {
        "tokens": [item.tokens for item in (*sampled, *greedy)],
        "mask": [item.mask for item in (*sampled, *greedy)],
        "engine": [item.logprobs for item in (*sampled, *greedy)],
        "trainer": [values for part, which in passes for values in scored(part, which)],
        "shortfall": [*(np.full(len(item), np.nan) for item in sampled), *scored(greedy, "shortfall")],
    }  # fmt: skip
    record = EvaluatedAnswers(
        name="held-out problems", version=version, claimed=answered.version, temperature=temperature,
        ids=tuple(row.id for row in rows), lengths=tuple(len(row.tokens) for row in rows),
        greedy=(False,) * len(answered.sampled) + (True,) * len(answered.greedy),
        max_answer_tokens=options.max_answer_tokens, end=end, other_ends=tuple(other_ends), shaped=answered.shaped,
        seeds=tuple(map(tuple, answered.seeds)), sent=answered.sent, weights=tuple(answered.weights),
    )  # fmt: skip
    kinds = {"mask": np.dtype(bool), "tokens": np.dtype(np.int64)}
    probe.emit(record, {name: np.concatenate(own, dtype=kinds.get(name, np.float32)) for name, own in arrays.items()})
    for item in answered.rewards:
        probe.emit(
            GivenRewards(
                name=f"held-out {item.number}", version=answered.version, reward=options.reward,
                ids=tuple(f"{item.number} {answered.version}/{at}/0/{one.id}" for at, one in enumerate(data.held_out)),
                texts=tuple(item.texts), answers=tuple(one.answer for one in data.held_out),
                rewards=tuple(item.rewards),
            )
        )  # fmt: skip
    if answered.turns is not None:
        probe.emit(turns_of(options, "held-out problems", answered.version, answered.turns))
    first = [row for row in rows if not row.index]

    def example_of(at: int) -> Example:
        return data.held_out[int(first[at].group.split("/", 2)[1])]

    record_tokens(
        probe, version, data.tokenizer, data.files, [rollout_of(row) for row in first], example_of, whole=False,
        chat=data.chat,
    )  # fmt: skip


def record_held_out(probe: Probe, version: int, data: RunData, file: Path) -> None:
    """Record the tokens of a few problems of fine-tuning."""
    rollouts, _ = load_rollouts(file)
    few = places(version, len(rollouts))
    record_tokens(
        probe, version, data.tokenizer, data.files, [rollouts[at] for at in few],
        lambda at: data.held_out[few[at]], whole=True,
    )  # fmt: skip
