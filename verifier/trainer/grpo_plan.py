"""Updates of GRPO: rollouts of a step to advantages, importance factors, weights and mini-batches, all by id."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from verifier.algorithms.advantages import advantages
from verifier.algorithms.filters import DropReason, first_reasons, overlong, zero_variance
from verifier.algorithms.kl import kl_penalty
from verifier.algorithms.off_policy import CorrectionOptions, correction
from verifier.config import TrainConfig
from verifier.data.recorded import RolloutRow, read_recorded, recorded_files, rollout_of
from verifier.data.rollout import Rollout, save_rollouts
from verifier.errors import UsageError
from verifier.model.checkpoint import Checkpoint
from verifier.model.families import size_if_any
from verifier.trainer.batches import (
    OptimizerUpdate,
    Score,
    ScoredRollouts,
    Values,
    require_routes,
    weights_of,
)
from verifier.trainer.fitting import require_budget
from verifier.trainer.metrics import by_position, mismatch_facts
from verifier.trainer.observer import SILENT, Observer, PolicyBatch
from verifier.trainer.sampled_batch import fresh_tokens, require_numbers

STALE = "stale"
"""Reason to drop a rollout: a token of it was sampled by weights that are older than the bound."""


class RolloutSource(Protocol):
    """Rollouts of a run's steps."""

    facts: Mapping[str, float]
    """Metrics of the last step's sampling."""

    def rollouts(self, step: int) -> tuple[Sequence[RolloutRow], str]:
        """Rollouts of a step, from 1 on, and the name of their reward; empty where it was not recorded."""


class RecordedRollouts:
    """Rollouts of earlier runs: a folder of JSONL files, one a step in the order of their names."""

    facts: Mapping[str, float] = MappingProxyType({})

    def __init__(self, config: TrainConfig, checkpoint: Checkpoint) -> None:
        folder = config.data.rollouts
        assert folder is not None
        self._files = recorded_files(folder)
        if len(self._files) < config.steps:
            raise UsageError(
                f"data.rollouts, `{folder}`, has {len(self._files)} files *.jsonl and steps is {config.steps}: "
                "a step takes a file, give as many or fewer steps"
            )
        self._vocab_size, self._group_size = size_if_any(checkpoint.config, "vocab_size"), config.grpo.group_size
        self._replay = checkpoint.config if config.grpo.replay_routes else None
        for file in self._files[: config.steps]:
            self._require_size(config, file, self._read(file))

    def rollouts(self, step: int) -> tuple[Sequence[RolloutRow], str]:
        """Read the file of a step."""
        rows = self._read(self._files[step - 1])
        names = {row.rewarded_by for row in rows}
        return rows, names.pop() if len(names) == 1 else ""

    @staticmethod
    def _require_size(config: TrainConfig, file: Path, rows: Sequence[RolloutRow]) -> None:
        """Refuse a file that does not fill its mini-batches, or a rollout that no micro-batch holds."""
        if len(rows) < config.grpo.mini_batches:
            raise UsageError(
                f"grpo.mini_batches is {config.grpo.mini_batches} and `{file}` has {len(rows)} rollouts: a mini-batch "
                "needs one of its own, use fewer"
            )
        require_budget(config, [rollout_of(row) for row in rows])

    def _read(self, file: Path) -> tuple[RolloutRow, ...]:
        rows = read_recorded(file, vocab_size=self._vocab_size, group_size=self._group_size)
        if self._replay is not None:
            require_routes(file, rows, self._replay)
        return rows


class GrpoPlan:
    """GRPO and its kin on the rollouts of a source.

    `file` names the batch of (step, mini-batch).
    """

    def __init__(
        self, config: TrainConfig, source: RolloutSource, file: Callable[[int, int], Path], observer: Observer = SILENT
    ) -> None:
        self._config, self._source, self._file, self._observer = config, source, file, observer
        self.facts: Mapping[str, Any] = {}

    def updates(self, step: int, taken: int, score: Score) -> list[OptimizerUpdate]:
        """Score, judge by reward, weigh and divide the rollouts of a step."""
        config, options = self._config, self._config.grpo
        began = time.monotonic()
        rows, reward = self._source.rollouts(step)
        given = [rollout_of(row) for row in rows]
        rolled = time.monotonic()
        if not self._observer.judges:
            require_numbers(config, rows)
        parts = [part.tolist() for part in np.array_split(np.arange(len(given)), options.mini_batches)]
        scored = self._scored(step, given, parts, score)
        scored_s = time.monotonic() - rolled
        self._observer.on_scores(step, scored, parts, self._file(step, 0))
        require_numbers(config, rows, step)
        times = {"score_s": scored_s} | ({} if config.data.rollouts else {"rollout_s": rolled - began})
        penalties = np.zeros(len(given))
        masks = [item.mask for item in given]
        if scored.reference is not None and options.kl_in == "reward":
            penalties = options.kl_weight * kl_penalty(scored.old, scored.reference, masks, options.kl_kind)
        rewards = [item.reward for item in given]
        trajectories = [row.trajectory or row.id for row in rows]
        found = advantages(
            np.array(rewards) - penalties, [item.group for item in given], options.advantage,
            trajectories=trajectories, token_counts=[int(mask.sum()) for mask in masks],
        )  # fmt: skip
        reasons = self._reasons(step, rows, given, trajectories)
        kept = [replace(item, mask=item.mask & (reason is None)) for item, reason in zip(given, reasons, strict=True)]
        factors = correction(
            [item.id for item in given], scored.old, [item.logprobs for item in given], [item.mask for item in kept],
            CorrectionOptions(
                weight=options.weight_level, cap=options.weight_cap, mask=options.mask_level,
                mask_low=options.mask_low, mask_high=options.mask_high,
            ),
        )  # fmt: skip
        columns: dict[str, list[np.ndarray]] = {
            "divisor": [*scored.old] if options.ratio_over == "old" else [item.logprobs for item in given],
            "advantage": [value * factor for value, factor in zip(found, factors, strict=True)],
        }
        if scored.reference is not None and options.kl_in == "loss":
            columns["reference"] = [*scored.reference]
        self.facts = {
            **_facts(config, step, rows, given, reasons, scored.old), **self._source.facts,
            **_token_counts(given, options.has_reference), **times,
        }  # fmt: skip
        updates = self._divided(step, taken, kept, columns, parts)
        self._observer.on_batch(
            PolicyBatch(
                step=step, rows=rows, reward=reward, scored=scored, parts=parts,
                files=[self._file(step, at) for at in range(len(parts))], penalties=penalties.tolist(),
                advantages=found.tolist(), reasons=[str(item or "") for item in reasons], columns=columns, kept=kept,
                updates=updates,
            )
        )  # fmt: skip
        return updates

    def _scored(self, step: int, given: list[Rollout], parts: list[list[int]], score: Score) -> ScoredRollouts:
        """Score each mini-batch by itself, divided as the first pass divides it, so that its ratios are exactly 1."""
        old: list[np.ndarray] = [np.empty(0)] * len(given)
        reference: list[np.ndarray] = [np.empty(0)] * len(given)
        for number, part in enumerate(parts):
            file = self._file(step, number)
            save_rollouts(file, [given[index] for index in part])
            sides = [(old, "current"), (reference, "reference")][: 2 if self._config.grpo.has_reference else 1]
            for values, which in sides:
                for index, found in zip(part, score(file, which), strict=True):
                    values[index] = found
        return ScoredRollouts(rollouts=given, old=old, reference=reference if self._config.grpo.has_reference else None)

    def _reasons(
        self, step: int, rows: Sequence[RolloutRow], given: Sequence[Rollout], trajectories: Sequence[str]
    ) -> list[DropReason | str | None]:
        """Reason for which each rollout leaves the loss, the first of several; None if it stays."""
        options, none = self._config.grpo, [None] * len(rows)
        rewards, groups = [item.reward for item in given], [item.group for item in given]
        filters = first_reasons(
            overlong([row.truncated for row in rows]) if options.drop_overlong else none,
            zero_variance(rewards, groups, trajectories) if options.drop_zero_variance else none,
        )
        oldest = [int(item.versions[item.sampled].min(initial=step - 1)) for item in given]
        late = [step - 1 - version > options.max_staleness for version in oldest]
        return [STALE if is_late else reason for is_late, reason in zip(late, filters, strict=True)]

    def _divided(
        self, step: int, taken: int, kept: list[Rollout], columns: Mapping[str, list[np.ndarray]],
        parts: list[list[int]],
    ) -> list[OptimizerUpdate]:  # fmt: skip
        """Updates of all passes over the mini-batches that have a token in the loss, numbered after those taken."""
        options, updates = self._config.grpo, []
        for number, part in enumerate(parts):
            rollouts = [kept[index] for index in part]
            if not any(item.mask.any() for item in rollouts):
                continue
            update = OptimizerUpdate(
                step=step, number=0, file=self._file(step, number), rollouts=rollouts,
                weights=weights_of(self._config, rollouts),
                columns={name: [values[index] for index in part] for name, values in columns.items()},
            )  # fmt: skip
            update.save()
            updates.append(update)
        return [
            replace(update, number=taken + place + 1, first=place == 0)
            for place, update in enumerate(updates * options.epochs)
        ]


def _facts(
    config: TrainConfig, step: int, rows: Sequence[RolloutRow], given: Sequence[Rollout],
    reasons: Sequence[DropReason | str | None], old: Values,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of a batch: rewards, lengths, groups with several rewards, age, mismatch of trainer and engine."""
    totals, group_of = defaultdict[str, float](float), {row.trajectory or row.id: row.group for row in rows}
    for row in rows:
        totals[row.trajectory or row.id] += row.reward
    rewards: dict[str, set[float]] = {}
    for name, group in group_of.items():
        rewards.setdefault(group, set()).add(totals[name])
    ends = [row for row in rows if row.trajectory is None or row.is_last_step]
    pairs = zip(given, old, strict=True)
    same = [fresh_tokens(config, item, step - 1) for item in given]
    difference = np.concatenate(
        [(own - item.logprobs)[fresh] for (item, own), fresh in zip(pairs, same, strict=True)]
    ).astype(np.float64)
    found: dict[str, Any] = {
        "reward": float(sum(totals.values()) / len(totals)),
        "answer_tokens": sum(sum(row.sampled) for row in rows) / len(totals),
        "truncated_share": float(np.mean([row.truncated for row in ends])),
        "mixed_groups": float(np.mean([len(values) > 1 for values in rewards.values()])),
    }
    if config.grpo.max_staleness:
        behind = np.concatenate([step - 1 - item.versions[item.sampled] for item in given])
        found |= {"staleness": float(behind.mean()), "dropped_stale": float(reasons.count(STALE))}
    if len(difference):
        places = [(np.cumsum(item.sampled) - 1)[fresh] for item, fresh in zip(given, same, strict=True)]
        longest = config.grpo.max_answer_tokens * config.grpo.max_turns
        found["mismatch_by_position"] = by_position(difference, np.concatenate(places), longest)
    return found | mismatch_facts(difference)


def _token_counts(given: Sequence[Rollout], with_reference: bool) -> dict[str, float]:
    return {
        "sampled_tokens": float(sum(int(item.sampled.sum()) for item in given)),
        "scored_tokens": float(sum(map(len, given)) * (2 if with_reference else 1)),
    }
