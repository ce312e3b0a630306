"""Updates and steps against Adam in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verifier.core import ragged
from verifier.core.check import (
    LOOP,
    At,
    Comparison,
    Stage,
    Tolerance,
    Trace,
    check,
    compare_array,
    compare_set,
    compare_value,
    owner_of,
)
from verifier.core.condition import NEEDS, on
from verifier.stages.checks_conditions import LAYOUT, NO_FSDP, UPDATED
from verifier.stages.loss.checks_gradients import COMPUTED, measured_at, of_update, reports_judged, subject_of
from verifier.stages.loss.records import GradientRecord
from verifier.stages.train.records import (
    AdamSample,
    GradientSums,
    OptimizerRule,
    SampledMaster,
    StepReport,
    SummedTensor,
    TrainerStep,
)

ROUNDINGS = 3
"""Roundings of a weight in float32 in a step of Adam: 1 - rate * decay, which is near 1, the decay, and the move."""
MOMENT_ROUNDINGS = 16
"""Roundings of a moment in float32: of the clip factor, the product with it, its square, both terms and their sum."""
ROUNDOFF = 2.0**-24
"""Greatest share that a rounding to float32 changes a number by."""
LEAST = 2.0**-126
"""Least normal number of float32: what is below it may be lost."""
CLIP_EPSILON = 1e-6
"""Number that is added to the norm of the gradient, which clips (torch.nn.utils.clip_grad_norm_)."""


@check("TRN005", needs=(AdamSample,), applies=on(step=UPDATED & NO_FSDP, loop=NEEDS))
def update_differs_from_adam(trace: Trace) -> Iterator[Comparison]:
    """In every update each rank moves its masters by Adam, with the clipped gradient, and all ranks' passes use them.

    What it checks: per rank and update, on up to 64 elements of up to 16 tensors, others in each update: masters and
    moments after it against Adam in float64 from masters, moments and reduced gradient before it, with the rate and
    decay of the tensor's group and the clip factor of the recorded norm; that weights are the masters, rounded to the
    weights' dtype, before it and after it, and before the first update of a process those of all tensors; that the
    gradient was zero before the first pass; that masters, moments and weights of the update before are what it left,
    and that all moments are 0 before the first one of a run; that passes use these weights on every rank, on up to 256
    elements of up to 16 tensors, others in each update, against those of the rank whose optimizer holds them. And that
    every parameter is trained; with adapters, every one of theirs.
    Why it matters: a clip that is computed and not applied, masters that no weight gets, or that the checkpoint never
    reached and that replace its weights at the first step, a tensor that no step moves and gradients that are kept from
    step to step all give a loss that falls. TRN001 sees them on sampled steps alone, and takes the trainer's own
    moments there.
    Evidence: train/adam, which has these elements; train/sums for the weights that passes use.
    Tolerance and its source: bitwise copies. 1e-3 of the learning rate, as TRN001, beyond three roundings to float32.
    Of a moment 16 roundings to float32 of its two terms, and that of its decay, which moves what is left of 1 by as
    much (Higham 2002, section 2.2).
    What it does not catch: a wrong gradient (LSS001, TRN006), norm (TRN006) or rate (TRN002); tensors whose turn has
    not come; weights that passes use of an adapter, or of a model without a layout, and on sampled steps, before which
    they are gathered for the oracle; runs with Megatron-FSDP, which the report says.
    References: Automodel#576, DeeperSpeed#56, tt-blacksmith#711, RL#3171, trl#3926, Megatron-LM#950, flashoptim#2,
    torchtitan#4382, RL#2371.
    """
    for audit in trace.of(AdamSample):
        at = At(Stage.TRAIN, audit.version, owner_of(audit))
        place, named = f"of {audit.name} on rank {audit.rank}", audit.name
        arrays, sizes = trace.arrays(audit), [item.elements for item in audit.tensors]
        parts = {key: ragged.split(values.astype(np.float64), sizes) for key, values in arrays.items()}
        for index, item in enumerate(audit.tensors):
            own = {key: split[index] for key, split in parts.items()}
            gap, off = compared_with_adam(audit, item, own)
            name, left = item.name, None if item.left is None else float(item.left)
            found = f"{gap:.3g} learning rates off" if math.isfinite(gap) else "not finite, unlike"
            sentence = f"{named} leaves masters of `{name}` that are {found} what Adam makes of its gradient"
            sides = f"{found} it (of {item.elements:,} elements from {item.begin:,} on)", "Adam's masters (float64)"
            hint = "look at the clip factor, at moments, and at what the optimizer was given"
            yield compare_value(at, f"{name} {place}", *sides, sentence=sentence, allowed=STEP, gap=gap, hint=hint)
            subject = f"the gap of moments of `{name}` after {named} to Adam's, in roundings of float32,"
            hint = "look at the dtype that moments pass through, and at what writes them after the step"
            words, what = "1, the roundings of float32", f"{name} (moments) {place}"
            yield compare_value(at, what, off, None, subject=subject, allowed=words, bound=1.0, hint=hint)
            sentence = f"after {named} weights of `{name}` are not its masters"
            hint = "look at what copies masters to the model after a step"
            copied = np.array_equal(rounded(own["master"], item.dtype), own["weight"])
            yield compare_value(at, f"{name} (weight) {place}", copied, True, sentence=sentence, hint=hint)
            subject = f"the greatest element of the gradient of `{name}` that {named} begins with"
            hint = "look at what zeroes gradients between steps"
            if left is not None:
                yield compare_value(at, f"{name} (gradient) {place}", left, 0.0, subject=subject, hint=hint)
        subject, total = f"tensors whose masters, moments or weights moved before {named}", audit.remembered
        hint = "look at what touches the optimizer or the weights between two steps"
        yield compare_set(at, f"state between updates {place}", audit.moved, total=total, subject=subject, hint=hint)
        subject = f"tensors whose weights are not the optimizer's masters before {named}"
        hint = "look at what loads weights after the optimizer was made, and tells its masters nothing"
        yield compare_set(at, f"masters of the weights {place}", audit.strays, subject=subject, hint=hint)
        if audit.begun_with is not None:
            subject = f"the greatest moment that {named}, the first of the run, begins with"
            hint = "look at what makes Adam's state before the first step: a step on nothing, a load"
            what, greatest = f"moments of a new run {place}", float(audit.begun_with)
            yield compare_value(at, what, greatest, 0.0, subject=subject, hint=hint)
        hint = "look at what sets requires_grad"
        subject = "parameters that are not trained, and are of no adapter's base"
        yield compare_set(at, f"trained parameters {place}", audit.frozen, subject=subject, hint=hint)
    yield from compare_used(trace)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def compared_with_adam(sample: AdamSample, tensor: SampledMaster, own: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Distance of one tensor from Adam (Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2).

    Args:
        sample: with Adam's settings.
        tensor: of the sample.
        own: arrays [elements] float64 of the tensor, by name as in `AdamSample`.

    Returns:
        Greatest distance of a master beyond its roundings to float32, in learning rates; greatest distance of a moment,
        in what float32 may round it by.
    """
    rate, decay, before = float(tensor.learning_rate), float(tensor.weight_decay), own["master_before"]
    factor = min(1.0, sample.clip_grad / (float(sample.grad_norm) + CLIP_EPSILON)) if sample.clip_grad else 1.0
    given = own["gradient"] * factor
    size = np.abs(given)
    if not sample.decoupled:
        given, size, decay = given + decay * before, size + np.abs(decay * before), 0.0  # what is added up is rounded
    corrected, apart = [], 0.0
    for name, beta, power in (("exp_avg", sample.beta_1, 1), ("exp_avg_sq", sample.beta_2, 2)):
        kept, new = beta * own[f"{name}_before"], (1 - beta) * given**power
        # A rounding of the decay moves 1 - beta by as much.
        rounding = MOMENT_ROUNDINGS * (np.abs(kept) + (1 - beta) * size**power) + size**power
        rounding = ROUNDOFF * rounding + LEAST
        apart = np.maximum(apart, np.abs(own[name] - (kept + new)) / rounding)
        corrected.append((kept + new) / (1 - beta**tensor.step))
    stepped = (1 - rate * decay) * before - rate * corrected[0] / (np.sqrt(corrected[1]) + sample.epsilon)
    _, exponent = np.frexp(np.maximum(np.abs(own["master"]), np.abs(stepped)))
    half_step = np.ldexp(ROUNDOFF / 2, exponent)
    excess = np.maximum(np.abs(own["master"] - stepped) - ROUNDINGS * half_step, 0)
    return float(np.where(excess == 0, 0.0, excess / rate).max()), float(np.max(apart))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values of float32, as float64, rounded to nearest, ties to even, in float32 or bfloat16."""
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        bits = single.view(np.uint32)
        single = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return single.astype(np.float64)


def compare_used(trace: Trace) -> Iterator[Comparison]:
    """Compare the weights of each rank's passes with those of the rank whose optimizer holds them."""
    used: dict[tuple[str, str, int], list[tuple[GradientSums, SummedTensor, np.ndarray]]] = defaultdict(list)
    for item in trace.of(GradientSums):
        values = ragged.split(trace.array(item, "used"), [tensor.elements for tensor in item.tensors])
        for tensor, own in zip(item.tensors, values, strict=True):
            used[item.name, tensor.group, tensor.begin].append((item, tensor, own))
    for copies in used.values():
        expected = np.full(copies[0][1].elements, np.nan, np.float32)
        for _, tensor, own in reversed(copies):
            held = slice(tensor.owned_begin, tensor.owned_begin + tensor.owned)
            expected[held] = own[held]
        if len(copies) != copies[0][1].copies or len(copies) < 2:
            continue
        for item, tensor, own in copies:
            what = f"weights of {tensor.name} in the passes of {item.name} on rank {item.rank}"
            subject, first = f"`{tensor.name}` in the passes of {item.name}", tensor.begin
            says, hint = ("", "the rank whose optimizer holds it"), "look at what gathers weights after a step"
            yield compare_array(item, what, own, expected, first=first, subject=subject, says=says, hint=hint)


NORM = Tolerance(
    absolute=1e-5, unit="of the norm",
    source="fp32 sums of squares in another order: a trainer's norm was measured within 4e-6 of one rank's",
)  # fmt: skip
NORM_ON_CPU = replace(NORM, absolute=2e-3, source="torch adds squares in few sums")
LESS_ON_CPU = replace(
    NORM_ON_CPU, absolute=5e-2, source="torch's float32 sum of squares is 3.8e-2 less, of 2^28 elements"
)
NORM_OF_BF16 = replace(
    NORM, absolute=2.0**-6, source="four roundings to bf16: of norms, of shards, of their sum, its root"
)
STEP = Tolerance(
    absolute=1e-3, unit="learning rates",
    source="beyond three roundings of the weight to float32; those of moments move an update by 3e-5 at most",
)  # fmt: skip


@check("TRN001", needs=(GradientRecord, StepReport, OptimizerRule), applies=COMPUTED)
def step_differs_from_adam(trace: Trace) -> Iterator[Comparison]:
    """After every step each live weight is the one before it, moved by Adam with the gradient that was there.

    What it checks: per checkpoint tensor, live weights after the step against Adam in float64 from the trainer's own
    reduced gradients and the oracle's own clip factor, moments and rates. These warm up, fall and are others for
    embeddings, and every second gradient is too short to be clipped; before the second step the optimizer is saved,
    made anew and loaded. And the norm that each rank clipped by against that of the same gradients.
    Why it matters: masters that were not refreshed, moments that a resume lost, a scheduler that lags, a clip by the
    wrong norm.
    Evidence: loss/gradient (a measurement, in learning rates; the norm of all gradients), train/step.
    Tolerance and its source: three roundings to float32 of each weight, and 1e-3 of the learning rate for those of
    moments, which move an update by 3e-5 at most. In bf16 half a step of that dtype more, from Adam's unrounded
    weights. 1e-5 of the norm; of a recorded loop's 2e-3 on CPUs, or 5e-2 less, and four
    roundings in bf16.
    Where to look: masters, moments and the clip factor, and which parameters and ranks the norm is summed over.
    What it does not catch: a wrong gradient (LSS001); on sampled steps of a training run, whose moments (in bf16 also
    masters) before the step are the trainer's own, what earlier steps did to these, and wrong rates (TRN002).
    References: SkyRL#2149, RL#2371, SkyRL#1403, slime#1152, slime#1775.
    """
    for item in trace.of(GradientRecord):
        if item.step is None:
            continue
        gap = float(item.step.value)
        owner, place, mismatched = measured_at(item.step)
        found = f"{gap:.3g} learning rates off" if math.isfinite(gap) else "not finite, unlike"
        at, wanted = At(Stage.TRAIN, item.version, owner), "the weight before, moved by Adam (float64)"
        sentence = f"`{item.name}` is {found} what Adam makes of its gradient{place}"
        what, part = subject_of(item), mismatched
        yield compare_value(at, what, gap, wanted, sentence=sentence, mismatched=part, allowed=STEP, gap=gap)
    for report, item in reports_judged(trace):
        what, says = f"gradient norm on rank {report.rank}{of_update(report)}", ("the optimizer's", "of all gradients")
        yield _normed(trace, report, what, float(item.gradient_norm), says=says)


def _normed(trace: Trace, report: StepReport | TrainerStep, what: str, expected: float, **told: Any) -> Comparison:
    """A norm; that of a recorded loop is torch's, and where it has no digit beyond bf16's, one of gradients in bf16."""
    allowed, norm = NORM, float(report.grad_norm)
    if trace.manifest.command == LOOP:
        is_short = not np.float32(norm).view(np.uint32) & 0xFFFF
        on_cpu = LESS_ON_CPU if norm < expected else NORM_ON_CPU
        allowed = NORM_OF_BF16 if is_short else on_cpu if trace.manifest.tier == "cpu" else NORM
    return compare_value(report, what, norm, expected, allowed=allowed, bound=allowed.absolute * expected, **told)


ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Greatest relative error of one sum in each type."""
TIMES_ALL = 2
"""Times all roundings of a sum over ranks, which right sums stay within (ADR 0109)."""

Place = tuple[str, str, int]
"""Update, label of the ranks that hold the same bits, index of the first element."""


@check("TRN006", needs=(GradientSums, TrainerStep), applies=on(step=UPDATED & NO_FSDP & LAYOUT, loop=NEEDS))
def gradient_not_summed(trace: Trace) -> Iterator[Comparison]:
    """Every optimizer is given the sum of its gradient over micro-batches and ranks, and clips by the norm of all.

    What it checks: per rank and update, on up to 256 elements of up to 16 tensors, others in each update: the gradient
    that the optimizer is given against the sum, in float64, of what every micro-batch's backward pass gave on every
    rank that holds the same weights, divided by the number of tokens; of tensors of up to 16,777,216 elements the sum
    of all, too, and that each is given to an optimizer; and the norm that each rank clipped by against the root of the
    sum of squares of all gradients, each counted once. That the marks by which Megatron counts a tensor in the norm are
    those of where it is whole and where divided, however small its gradient is. And that gradients are added in float32
    where the config asks for this.
    Why it matters: gradients of one rank, or of the last micro-batch alone, make a loss that falls as well, of a batch
    that is smaller than the config says. A norm that is wrong on all ranks alike shortens every step.
    Evidence: train/sums, train/done, and the manifest's config.
    Tolerance and its source: twice half a unit in the last place of the type that gradients are added in for each
    addition and scaling, of the sum of magnitudes (Higham 2002, section 4.2). Right sums reach half of it at most, by
    no chance more. Of the norm 1e-5: 7.2 standard deviations of 19,500 squares that are added one after another; of a
    recorded loop's 2e-3 on CPUs, or 5e-2 less, where torch adds squares in few sums, and four roundings in bf16.
    Where to look: what zeroes the gradient buffer, its reduction over ranks, what scales it, the first and last
    elements of buckets and of shards, and their padding.
    What it does not catch: what a backward pass gives (LSS001); linears whose kernel adds to the buffer itself; tensors
    whose turn has not come; elements that are exchanged within a tensor, beside the 256, and on a GPU, where sums of
    all are not made, others beside them; runs with Megatron-FSDP or an optimizer on the host, which the report says.
    References: verl#7493, torchtitan#3575, ROCm/TransformerEngine#715, Megatron-LM#844, Megatron-LM#7227,
    Megatron-LM#7452, Megatron-LM#561, Megatron-LM#6624, ISEEKYAN/Megatron-LM#146.
    """
    sums, steps = _sums_and_steps(trace)
    yield from _all_summed(trace, sums, steps)
    yield from _added_in(trace, sums)
    squares: dict[str, dict[int, float]] = defaultdict(dict)
    for item in sums:
        if item.squares is not None:
            yield _marked(item)
            squares[item.name][item.rank] = float(item.squares)
    says = "the optimizer clips by it", "all ranks' gradients, each counted once, float64"
    hint = "look at what the norm counts twice or leaves out, and over which ranks it is summed"
    for (name, rank), step in steps.items():
        if len(squares[name]) == trace.manifest.world_size:
            what, right = f"gradient norm of {name} on rank {rank}", math.sqrt(sum(squares[name].values()))
            yield _normed(trace, step, what, right, says=says, hint=hint)


def is_summed(trace: Trace) -> bool:
    """Tell whether every gradient that was audited is the sum that it should be."""
    return all(found.same for found in _all_summed(trace, *_sums_and_steps(trace)))


def _sums_and_steps(trace: Trace) -> tuple[list[GradientSums], dict[tuple[str, int], TrainerStep]]:
    steps = {(item.name, item.rank): item for item in trace.of(TrainerStep)}
    return [item for item in trace.of(GradientSums) if (item.name, item.rank) in steps], steps


def _all_summed(
    trace: Trace, sums: Sequence[GradientSums], steps: Mapping[tuple[str, int], TrainerStep]
) -> Iterator[Comparison]:
    added: dict[Place, list[np.ndarray]] = defaultdict(list)
    whole: dict[Place, list[tuple[GradientSums, SummedTensor, np.ndarray]]] = defaultdict(list)
    for item in sums:
        for tensor, own in zip(item.tensors, _cut(trace, item, "added"), strict=True):
            added[item.name, tensor.group, tensor.begin].append(own)
        if "whole" in (arrays := trace.arrays(item)):
            for tensor, row in zip(item.tensors, arrays["whole"], strict=True):
                whole[item.name, tensor.group, tensor.begin].append((item, tensor, row))
    for item in sums:
        for tensor, own in zip(item.tensors, _cut(trace, item, "reduced"), strict=True):
            parts = added[item.name, tensor.group, tensor.begin]
            if len(parts) == tensor.copies and tensor.owned:
                yield _summed(item, tensor, own, np.stack(parts), _divisor(item, steps[item.name, item.rank]))
    for found in whole.values():
        item, tensor, _ = found[0]
        if tensor.size and len(found) == tensor.copies:
            yield _whole(found, _divisor(item, steps[item.name, item.rank]))


def _divisor(item: GradientSums, step: TrainerStep) -> float:
    return max(step.num_tokens, 1) if item.divisor is None else float(item.divisor)


def _cut(trace: Trace, item: GradientSums, name: str) -> list[np.ndarray]:
    sizes = [tensor.owned if name == "reduced" else tensor.elements for tensor in item.tensors]
    return ragged.split(trace.array(item, name).astype(np.float64), sizes)


def _roundings(ranks: int, passes: int = 1) -> int:
    """Twice the number of roundings: of additions, of the inverse of the tokens' number, and of the product with it."""
    return TIMES_ALL * ((passes - 1) + (ranks - 1) + 2)


def _summed(
    item: GradientSums, tensor: SummedTensor, actual: np.ndarray, parts: np.ndarray, divisor: float
) -> Comparison:
    parts = parts[:, tensor.owned_begin : tensor.owned_begin + tensor.owned] / divisor
    expected, magnitude = parts.sum(0), np.abs(parts).sum(0)
    count = _roundings(len(parts))
    bounds = count * (ROUNDING[tensor.dtype] * magnitude + LEAST)
    gap = np.abs(actual - expected)
    worst = int(np.argmax(np.where(np.isfinite(gap), gap / bounds, np.inf)))
    place, bound = tensor.begin + tensor.owned_begin + worst, float(bounds[worst])
    what = f"gradient of {tensor.name} of {item.name} on rank {item.rank}"
    subject = f"the gradient of element {place:,} of `{tensor.name}` that {item.name} gives the optimizer"
    says = "", f"what micro-batches of {len(parts)} ranks gave, divided by {divisor:,}"
    words, same = f"{bound:.3g} ({count} roundings of {tensor.dtype})", bool((gap <= bounds).all())
    found, right = float(actual[worst]), float(expected[worst])
    return compare_value(item, what, found, right, same=same, subject=subject, says=says, allowed=words, bound=bound)


def _whole(found: Sequence[tuple[GradientSums, SummedTensor, np.ndarray]], divisor: float) -> Comparison:
    item, tensor, _ = found[0]
    given, magnitude, passes, reduced = np.stack([row for _, _, row in found]).T
    times_owned, rest = divmod(sum(own.owned_size for _, own, _ in found), tensor.size)
    scale = max(times_owned, 1) / divisor
    expected, actual = float(given.sum()) * scale, float(reduced.sum())
    count = _roundings(len(found), int(passes.max()))
    allowed = count * (ROUNDING[tensor.dtype] * float(magnitude.sum()) * scale + LEAST * tensor.size)
    gap = abs(actual - expected)
    lost = rest or not times_owned
    what, same = f"whole gradient of {tensor.name} of {item.name}", gap <= allowed and not lost
    sentence = (
        f"{item.name} gives optimizers {'not all' if lost else 'other'} elements of the gradient of `{tensor.name}`"
    )
    sentence += f"{'' if lost else ' than its passes gave'}: they add up to {actual:.9g}, not to {expected:.9g}"
    says = f"{times_owned} of each element", f"{tensor.size:,} elements of {len(found)} ranks, divided by {divisor:,}"
    words = f"{allowed:.3g} ({count} roundings of {tensor.dtype}, of all magnitudes)"
    return compare_value(
        item, what, actual, expected, same=same, sentence=sentence, says=says, allowed=words, bound=allowed
    )


def _added_in(trace: Trace, sums: Sequence[GradientSums]) -> Iterator[Comparison]:
    asked = trace.manifest.config.get("megatron")
    if not isinstance(asked, Mapping) or asked.get("grad_reduce_in_fp32") is not True:
        return
    for item in sums:
        others = [tensor.name for tensor in item.tensors if tensor.dtype != "float32"]
        subject, total = f"tensors whose gradients {item.name} adds up in less than float32", len(item.tensors)
        hint, badness = "look at what makes the gradient buffers", len(others) / max(total, 1)
        what = f"type of the sums of {item.name} on rank {item.rank}"
        yield compare_set(item, what, others, total=total, subject=subject, hint=hint, badness=badness)


def _marked(item: GradientSums) -> Comparison:
    what = f"tensors in the norm of {item.name} on rank {item.rank}"
    hint = "look at the `tensor_model_parallel` and `shared` marks"
    subject = f"tensors that the norm of {item.name} counts never or twice, as rank {item.rank} is marked otherwise"
    return compare_set(item, what, item.miscounted, subject=subject, hint=hint)
