"""Every step of a training run: weights of its tokens, its rates, its counters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verifier.checks.conditions import UPDATED
from verifier.checks.estimators import ROUNDOFFS
from verifier.core import ragged
from verifier.core.check import Comparison, Tolerance, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.core.record import Real
from verifier.core.records_trainer import (
    LossColumns,
    OptimizerSettings,
    TrainerStep,
)

WEIGHT = Tolerance(
    absolute=1e-12, unit="of the weight", source="float64: a weight is two divisions of whole numbers, 2 ulp apart"
)
WEIGHT_ROUNDINGS = 16
"""Roundings of a weight in the dtype of a loss whose backward pass says it: mask, means, sums, and a scale."""
RATE = Tolerance(
    absolute=1e-12, unit="of the learning rate", source="float64: a closed form of a few operations, some ulp apart"
)


@check("ADV001", needs=(LossColumns,), applies=on(step=UPDATED, loop=recorded(LossColumns)))
def weight_differs_from_aggregation(trace: Trace) -> Iterator[Comparison]:
    """The weight of every token is what the aggregation makes of the masks of the whole batch.

    What it checks: per rollout, the weights of its tokens against the textbook mean in float64, from masks and groups
    alone: over all tokens, over sequences, or over prompts.
    Why it matters: a mean of the means of micro-batches, or a denominator taken after the split, changes the step with
    every change of mesh or micro-batch. It is the commonest silent bug of RL trainers.
    Evidence: advantage/columns ("weight", "mask").
    Tolerance and its source: 1e-12 of the weight; float64, two divisions. Of a recorded loop, whose weights are the
    derivatives of its loss by each token's, 16 roundings in the loss's dtype.
    Where to look: the denominators, and whether they are those of the whole batch.
    What it does not catch: a mask that is wrong itself (PCK001), and what ranks make of the weights (LSS001).
    References: AReaL#1730, verl#3741, verl#7200, trl#3231.
    """
    for item in trace.of(LossColumns):
        masks = ragged.split(trace.array(item, "mask").astype(bool), item.lengths)
        weights = ragged.split(trace.array(item, "weight").astype(np.float64), item.lengths)
        expected = _weights(item, masks)
        for name, weight, mask, right in zip(item.ids, weights, masks, expected, strict=True):
            wanted = np.where(mask, right, 0.0)

            at = int(np.abs(weight - wanted).argmax()) if len(weight) else 0
            actual, asked = (float(side[at]) if len(side) else 0.0 for side in (weight, wanted))
            subject = f"the weight of token {at} of `{name}`"
            says = ("", f"{item.aggregation} of the whole batch, float64")
            bound = max(WEIGHT.absolute, WEIGHT_ROUNDINGS * ROUNDOFFS[item.dtype]) * right
            yield compare_value(item, name, actual, asked, subject=subject, says=says, allowed=WEIGHT, bound=bound)


def _weights(item: LossColumns, masks: list[np.ndarray]) -> list[float]:
    """Weight of each token in the loss, rollout by rollout."""
    counts = [int(mask.sum()) for mask in masks]
    total, trained = sum(counts), [count for count in counts if count]
    by_prompt: dict[str, int] = defaultdict(int)
    for group, count in zip(item.groups, counts, strict=True):
        by_prompt[group] += count
    prompts = sum(1 for count in by_prompt.values() if count)
    return [
        0.0 if not count
        else 1 / total if item.aggregation == "token_mean"
        else 1 / (len(trained) * count) if item.aggregation == "sequence_mean"
        else 1 / (prompts * by_prompt[group]) if item.aggregation == "prompt_mean"
        else 1 / (len(counts) * item.constant)
        for count, group in zip(counts, item.groups, strict=True)
    ]  # fmt: skip


@check(
    "TRN002",
    needs=(TrainerStep, OptimizerSettings),
    applies=on(step=UPDATED, loop=recorded(TrainerStep, OptimizerSettings)),
)
def rate_off_schedule(trace: Trace) -> Iterator[Comparison]:
    """Each step has the learning rate and the weight decay that its number calls for.

    What it checks: per rank, the rate and the decay that the optimizer held in the step for each of its groups of
    parameters, against the schedule in closed form, its warm-up included; matrices decay, and parameters of one
    dimension, which are norms and biases, do not. The schedule itself against the run's config, its end included: steps
    times mini-batches times epochs, since it counts updates.
    Why it matters: a scheduler that is stepped twice, not at all, by samples, or for one group alone, and one that a
    resume begins anew; norms that decay are smaller and no curve shows it.
    Evidence: train/done, train/optimizer (as the config asks).
    Tolerance and its source: exact settings, which are copied. 1e-12 of the learning rate; float64, a closed form.
    Where to look: what the schedule counts (updates, steps, samples), what steps the scheduler, and what groups
    parameters by their decay.
    What it does not catch: a rate that the optimizer holds and does not use (TRN001).
    References: open-r1#450, NeMo-RL#3171, SkyRL#1403, SkyRL#873, DeepSpeed#7969, Fast-LLM#542.
    """
    asked = _schedule_asked(trace.manifest.config)
    for settings in trace.of(OptimizerSettings):
        for name, right in asked.items():
            says, subject = ("the optimizer's settings", "the manifest's config"), f"{name} of the schedule"
            yield compare_value(settings, name, getattr(settings, name), right, subject=subject, says=says, owner="")
        for report in trace.of(TrainerStep, version=settings.version):
            wanted = _rate(settings, report.step)
            pairs = [
                ("learning rate", float(report.learning_rate), wanted),
                ("weight decay", float(report.weight_decay), settings.weight_decay),
            ]
            for at, group in enumerate(report.groups):
                pairs.append((f"learning rate of group {at}", float(group.learning_rate), wanted))
                spared = settings.vectors_decay is not True and group.vectors > 0  # or nobody says
                if not spared or (settings.vectors_decay is False and not group.others):
                    decay = 0.0 if spared else settings.weight_decay
                    pairs.append((f"weight decay of group {at}", float(group.weight_decay), decay))
                mixed = bool(settings.weight_decay and spared and group.others and settings.vectors_decay is False)
                place = f"group {at} of {report.name} on rank {report.rank}"
                subject = f"the number of norms and biases beside {group.others} others, which decay, in {place}"
                yield compare_value(report, place, group.vectors, 0, same=not mixed, subject=subject)
            for what, actual, expected in pairs:
                place = f"{what} of {report.name} on rank {report.rank}"
                bound = RATE.absolute * max(expected, settings.learning_rate)
                says = "the optimizer's", f"the {settings.schedule} schedule at step {report.step}"
                yield compare_value(report, place, actual, expected, says=says, allowed=RATE, bound=bound)


def _schedule_asked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the optimizer that a run's config asks for, by field; empty where it names none."""
    optimizer, grpo = config.get("optimizer"), config.get("grpo")
    if not isinstance(optimizer, Mapping) or not isinstance(grpo, Mapping) or "steps" not in config:
        return {}
    updates = config["steps"]
    if config["algorithm"] == "grpo":
        updates *= grpo["mini_batches"] * grpo["epochs"]
    fields = {name: optimizer[name] for name in OptimizerSettings.__struct_fields__ if name in optimizer}
    return {**fields, "decay_steps": max(updates, optimizer["warmup_steps"] + 1)}


def _rate(settings: OptimizerSettings, step: int) -> float:
    high, low, warmup = settings.learning_rate, settings.least_learning_rate, settings.warmup_steps
    step -= settings.behind
    if step <= warmup and warmup:
        return high * step / warmup
    if settings.schedule == "constant":
        return high
    share = min(1.0, (step - warmup) / (settings.decay_steps - warmup))
    left = 1 - share if settings.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return low + left * (high - low)


@check("TRN003", needs=(TrainerStep, LossColumns), applies=on(step=UPDATED, loop=recorded(TrainerStep, LossColumns)))
def step_counted_wrong(trace: Trace) -> Iterator[Comparison]:
    """A step is one step of the optimizer and one of the scheduler, over the tokens of the whole batch.

    What it checks: per rank, the counters of Adam and of the scheduler after the step, and the number of tokens in the
    loss, against the number of the step and the masks of the batch; and that all ranks clipped by one norm.
    Why it matters: an optimizer that is stepped per micro-batch, skipped, or made anew by a resume, whose bias
    correction then begins again; a norm of one rank's gradients, which clips each rank by another factor.
    Evidence: train/done, advantage/columns.
    Tolerance and its source: exact; these are counts, and one number that all ranks have from one reduction.
    Where to look: who calls the optimizer and the scheduler, and how often.
    What it does not catch: moments that are wrong, a norm that is wrong on all ranks alike (TRN006).
    References: NeMo-RL#3171, open-r1#450, SkyRL#1420.
    """
    for version in sorted(trace.versions(LossColumns)):
        columns = trace.of(LossColumns, version=version)
        in_loss = {item.name: int(trace.array(item, "mask").sum()) for item in columns}
        norms: dict[str, Real] = {}
        for report in trace.of(TrainerStep, version=version):
            norm = norms.setdefault(report.name, report.grad_norm)
            counts = (
                ("norm that it clipped by", report.grad_norm, norm),
                ("number of optimizer steps", report.optimizer_steps, report.step),
                ("number of scheduler steps", report.scheduler_steps, report.step + report.scheduler_ahead),
                ("number of tokens in the loss", report.num_tokens, in_loss.get(report.name, 0)),
            )
            for what, actual, expected in counts:
                if actual is not None:
                    yield compare_value(report, f"{what} of {report.name} on rank {report.rank}", actual, expected)
