"""Moves of weights and of score biases, rates and counters of each step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_array, compare_value
from verifier.core.condition import ALWAYS, NEEDS, condition, knob, on, recorded
from verifier.core.record import Real, TensorRecord
from verifier.stages.advantage.records import LossColumns
from verifier.stages.checks_conditions import ADAPTER, EXPORTS, LAYOUT, NO_ADAPTER, SENT, UPDATED
from verifier.stages.checks_content import Moment, by_name, compare_moments
from verifier.stages.checks_parts import parts_of
from verifier.stages.export.records import ExportedTensor, ShardAfterExport
from verifier.stages.load.records import LoadedShard, SourceTensor
from verifier.stages.train.records import (
    FrozenShard,
    JoinedTensor,
    LiveAdapterMatrix,
    OptimizerSettings,
    RouterBalance,
    ShardAfterIdleStep,
    ShardAfterScoring,
    TrainerStep,
    Update,
    UpdatedShard,
)

OUTWARD = ".lora_B.weight"
"""End of the names of an adapter's outward matrices."""


def shards_at(version: int) -> Moment:
    """Moment at which all live weights of a version were recorded."""
    return UpdatedShard if version else LoadedShard, version


MOVES_RECORDED = (
    recorded(ShardAfterExport) | recorded(ShardAfterScoring) | recorded(ShardAfterIdleStep) | recorded(FrozenShard)
)


@check(
    "WGT010",
    needs=(LoadedShard, ShardAfterExport, ShardAfterScoring, ShardAfterIdleStep, FrozenShard),
    applies=on(
        golden=ALWAYS, roundtrip=ALWAYS, step=UPDATED & ADAPTER, answers=SENT & ADAPTER,
        loop=recorded(LoadedShard) & MOVES_RECORDED,
    ),
    wholly=on(golden=ALWAYS, roundtrip=NO_ADAPTER | LAYOUT, step=ALWAYS, answers=ALWAYS, loop=ALWAYS),
)  # fmt: skip
def weight_moved_outside_of_updates(trace: Trace) -> Iterator[Comparison]:
    """An export, a scoring pass and a step of rate 0 leave every live weight bit alone, a step of an adapter its base.

    What it checks: each rank's parameters and persistent buffers right after each export, each scoring pass and a step
    with learning rate 0, against those before it; those outside of adapters after every step against those after load.
    Why it matters: an export that casts, transposes or merges in place, or takes an adapter out of its base again by
    subtraction, trains on from weights that no optimizer made. An evaluation that steps the optimizer, or a forward
    that updates router statistics, trains on what it should only measure; the next update hides it. An optimizer whose
    fp32 masters were not refreshed at load writes stale weights back at its first step, whatever the gradient is. What
    is synced of an adapter is the adapter alone, so a norm or a router that was not frozen trains away from the base
    that the engine holds.
    Evidence: load/shard, train/shard, export/exported, train/scored, train/idle, train/frozen.
    Tolerance and its source: bitwise; an export and a forward pass write no weight, adding zero changes no bit, a
    rounded master rounds to the same bits, and no optimizer has a frozen base.
    Where to look: what writes in place: casts, transposes and merges of an export; what an evaluation calls (a step, a
    hook, a counter); masters that a load did not refresh; what is frozen, and what the optimizer was given.
    What it does not catch: an export that writes from version 1 on only, where ranks share weights for data or context
    parallelism: their update is complete only once an export or a forward asks for it (TRN001 sees it). What scoring
    moves after every second update, which it comes before, is taken for the update's (TRN001). Masters with the right
    weights but wrong moments; a base that was loaded wrongly (WGT001).
    References: ms-swift#10154, verl#2029, AReaL#1546, RL#1012, SkyRL#2149, RL#2371, NeMo-RL#2754.
    """
    exported = trace.versions(ShardAfterExport)

    def before_idle_step(version: int) -> Moment:  # what an export left, whatever it left
        return (ShardAfterExport, version) if version in exported else shards_at(version)

    before = "the model before it"
    yield from compare_moments(trace, ShardAfterExport, shards_at, ("the model after the export", before))
    yield from compare_moments(trace, ShardAfterScoring, shards_at, ("the model after scoring", before))
    yield from compare_moments(trace, ShardAfterIdleStep, before_idle_step, ("the model after an lr = 0 step", before))
    says = "the base after a step of the adapter", "the base after load"
    yield from compare_moments(trace, FrozenShard, lambda version: (LoadedShard, 0), says)


@check(
    "WGT008", needs=(Update,),
    applies=on(roundtrip=EXPORTS & LAYOUT, loop=recorded(JoinedTensor, ExportedTensor, Update)),
)  # fmt: skip
def update_moved_nothing(trace: Trace) -> Iterator[Comparison]:
    """Every update changes the weights, so that a sync which delivers nothing cannot pass.

    What it checks: at each version above 0, the number of checkpoint tensors whose live bits changed since the version
    before is not zero; for the noise update it is every floating-point tensor, for an adapter every one of its outward
    matrices (B), which are zero before the first step.
    Why it matters: syncing unchanged weights proves nothing about delivery.
    Evidence: train/update, load/source, train/live, train/adapter.
    Tolerance and its source: exact counts.
    Where to look: whether the optimizer stepped, and whether its parameters are the model's.
    What it does not catch: a parameter that should have moved and did not (TRN001).
    References: verl#4248, prime-rl#1145.
    """
    for item in trace.of(Update):
        before, after = (_updated(trace, item.how, version) for version in (item.version - 1, item.version))
        if not after:
            continue
        moved, total = sum(before[name].digest != after[name].digest for name in after if name in before), len(after)
        floats = sum("float" in tensor.dtype for tensor in after.values())
        least = {"step": 1, "noise": floats, "adapter step": total}[item.how]
        sentence = f"the update changed {moved} of the model's {total} tensors, at least {least} had to change"
        right = f"{least} or more"
        yield compare_value(item, item.name, moved, right, same=moved >= least, sentence=sentence, owner="")


def _updated(trace: Trace, how: str, version: int) -> Mapping[str, TensorRecord]:
    if how == "adapter step":
        matrices = by_name(trace.of(LiveAdapterMatrix, version=version))
        return {name: item for name, item in matrices.items() if name.endswith(OUTWARD)}
    return by_name(trace.of(JoinedTensor if version else SourceTensor, version=version))


BALANCED = condition(
    "routers have no score biases", lambda run: run.facts.score_bias or knob(run, "megatron.moe_bias_update_rate")
)  # fmt: skip


@check("TRN004", needs=(RouterBalance,), applies=on(step=UPDATED & BALANCED))
def score_bias_moved_wrong(trace: Trace) -> Iterator[Comparison]:
    """Each step moves each router's score bias by rate * sign(mean - tokens of the expert), bit by bit.

    What it checks: per update, layer and rank, the bias after the step against that before it on the layer's first
    rank, moved by the rate that the config asks for: up where an expert was given fewer tokens than the mean, down
    where it was given more. And that before it against what the update before left, in the same process. Tokens are
    summed over all ranks that hold the layer, from the outputs of their routers in the forward passes of the update.
    Every rank of a stage must have recorded the layer.
    Why it matters: the bias chooses experts, and has no gradient that a comparison of gradients would see. Counts of
    one rank, counts that an evaluation left, or a bias in bf16 unbalance experts slowly, and ranks drift apart.
    Evidence: train/balance ("before", "after", "tokens").
    Tolerance and its source: bitwise; one float32 sum of the bias and the rate, and integers of which a sign is taken.
    Where to look: whose tokens were counted, over which ranks, what touches the routers' buffers between two steps, and
    the bias's dtype.
    What it does not catch: counts that are wrong by one factor for all experts, as where recomputation counts again: no
    sign changes. A bias that moves before the first step of a process (CKP001 across a resume), or on its way to the
    engine (ENG001).
    References: torchtitan#4148, torchtitan#3386, torchtitan#3686, Megatron-LM#1482, Megatron-LM#7081, miles#811.
    """
    held: dict[tuple[int, str, int], list[tuple[RouterBalance, int]]] = defaultdict(list)
    for item in trace.of(RouterBalance):
        for row, layer in enumerate(item.layers):
            held[item.version, item.name, layer].append((item, row))
    mesh = trace.manifest.mesh
    num_ranks = trace.manifest.world_size // (mesh.pp if mesh else 1)
    for (version, name, layer), found in sorted(held.items()):
        found.sort(key=lambda pair: pair[0].rank)
        place, what, absent = At(Stage.TRAIN, version), f"ranks of layer {layer} in {name}", len(found) < num_ranks
        subject = f"the number of ranks that counted the tokens of layer {layer} in {name}"
        yield compare_value(place, what, len(found), num_ranks, subject=subject, absent=absent)
        tokens = np.sum([trace.array(item, "tokens")[row].astype(np.int64) for item, row in found], axis=0)
        first, at = found[0]
        before, rate = trace.array(first, "before")[at], np.float32(first.rate)
        signs = np.sign(tokens.sum() - len(tokens) * tokens)
        expected = before + signs.astype(np.float32) * rate
        yield from (_kept(trace, item, row, layer) for item, row in found if "left" in trace.arrays(item))
        for item, row in found:
            after = trace.array(item, "after")[row]
            what = f"layer {layer} in {name} on rank {item.rank}"
            subject = f"the score bias of layer {layer} after {name}"
            says = "", f"what it was, and {first.rate:g} * sign({tokens.mean():,.1f} - tokens of the expert)"
            yield compare_array(item, what, after, expected, unit="expert", subject=subject, says=says)


def _kept(trace: Trace, item: RouterBalance, row: int, layer: int) -> Comparison:
    left, before = (trace.array(item, name)[row] for name in ("left", "before"))
    what = f"layer {layer} before {item.name} on rank {item.rank}"
    says = ("the live router", "what the update before left")
    subject = f"the score bias of layer {layer} before {item.name}"
    return compare_array(item, what, before, left, unit="expert", subject=subject, says=says)


RATE = Tolerance(
    absolute=1e-12, unit="of the learning rate", source="float64: a closed form of a few operations, some ulp apart"
)


@check("TRN002", needs=(TrainerStep, OptimizerSettings), applies=on(step=UPDATED, loop=NEEDS))
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
    step = -(-step // settings.updates_per_rate) - settings.behind
    if step <= warmup and warmup:
        return high * step / warmup
    if settings.schedule == "constant":
        return high
    share = min(1.0, (step - warmup) / (settings.decay_steps - warmup))
    left = 1 - share if settings.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return low + left * (high - low)


@check("TRN003", needs=(TrainerStep, LossColumns), applies=on(step=UPDATED, loop=NEEDS))
def step_counted_wrong(trace: Trace) -> Iterator[Comparison]:
    """A step is one step of the optimizer and one of the scheduler, over the tokens of the whole batch.

    What it checks: per rank, the counters of Adam and of the scheduler after the step, and the number of tokens in the
    loss, against the number of the step and the masks of the batch, or of the rank's own part where a recorded loop
    reports that; and that all ranks clipped by one norm.
    Why it matters: an optimizer that is stepped per micro-batch, skipped, or made anew by a resume, whose bias
    correction then begins again; a norm of one rank's gradients, which clips each rank by another factor.
    Evidence: train/done, advantage/columns.
    Tolerance and its source: exact; these are counts, and one number that all ranks have from one reduction.
    Where to look: who calls the optimizer and the scheduler, and how often.
    What it does not catch: moments that are wrong, a norm that is wrong on all ranks alike (TRN006).
    References: NeMo-RL#3171, open-r1#450, SkyRL#1420.
    """
    for version in sorted(trace.versions(LossColumns)):
        columns, parts = trace.of(LossColumns, version=version), parts_of(trace, version)
        in_loss = {item.name: int(trace.array(item, "mask").sum()) for item in columns}
        own = {rank: part.num_tokens for part in parts for rank in part.ranks}
        norms: dict[str, Real] = {}
        for report in trace.of(TrainerStep, version=version):
            norm = norms.setdefault(report.name, report.grad_norm)
            tokens = sum(part.num_tokens for part in parts) if parts else in_loss.get(report.name, 0)
            if report.num_tokens == own.get(report.rank):
                tokens = report.num_tokens
            counts = (
                ("norm that it clipped by", report.grad_norm, norm),
                ("number of optimizer steps", report.optimizer_steps, report.step),
                ("number of scheduler steps", report.scheduler_steps, report.step + report.scheduler_ahead),
                ("number of tokens in the loss", report.num_tokens, tokens),
            )
            for what, actual, expected in counts:
                if actual is not None:
                    yield compare_value(report, f"{what} of {report.name} on rank {report.rank}", actual, expected)
