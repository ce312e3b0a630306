"""Every update of a training run: what the optimizer is given is the sum of what all backward passes gave."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from verifier.core import ragged
from verifier.core.check import Comparison, Trace, check, compare_set, compare_value
from verifier.core.condition import on, recorded
from verifier.stages.checks_conditions import LAYOUT, NO_FSDP, UPDATED
from verifier.stages.train.checks_adam_audit import NORM
from verifier.stages.train.records import GradientSums, SummedTensor, TrainerStep

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Greatest relative error of one sum in each type."""
SCALINGS = 3
"""Roundings beside those of the sum: the inverse of the number of tokens, the product with it, and one to spare."""
LEAST = 2.0**-126
"""Least normal number of either type: what is below it may be lost."""

Place = tuple[str, str, int]
"""Update, label of the ranks that hold the same bits, index of the first element."""


@check(
    "TRN006",
    needs=(GradientSums, TrainerStep),
    applies=on(step=UPDATED & NO_FSDP & LAYOUT, loop=recorded(GradientSums, TrainerStep)),
)
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
    Tolerance and its source: half a unit in the last place of the type that gradients are added in for each addition
    and scaling, of the sum of magnitudes (Higham 2002, section 4.2) , which chance cannot exceed. Of the norm 1e-5: 7.2
    standard deviations of 19,500 squares that are added one after another.
    Where to look: what zeroes the gradient buffer, its reduction over ranks, what scales it, the first and last
    elements of buckets and of shards, and their padding.
    What it does not catch: what a backward pass gives (LSS001); linears whose kernel adds to the buffer itself; tensors
    whose turn has not come; elements that are exchanged within a tensor, beside the 256, and on a GPU, where sums of
    all are not made, others beside them; runs with Megatron-FSDP or an optimizer on the host, which the report says.
    References: verl#7493, torchtitan#3575, ROCm/TransformerEngine#715, Megatron-LM#844, Megatron-LM#7227,
    Megatron-LM#7452, Megatron-LM#561, Megatron-LM#6624, ISEEKYAN/Megatron-LM#146.
    """
    steps = {(item.name, item.rank): item for item in trace.of(TrainerStep)}
    sums = [item for item in trace.of(GradientSums) if (item.name, item.rank) in steps]
    yield from _all_summed(trace, sums, steps)
    yield from _added_in(trace, sums)
    squares: dict[str, dict[int, float]] = defaultdict(dict)
    for item in sums:
        if item.squares is not None:
            yield _marked(item)
            squares[item.name][item.rank] = float(item.squares)
    for (name, rank), step in steps.items():
        if len(squares[name]) == trace.manifest.world_size:
            yield _normed(step, rank, math.sqrt(sum(squares[name].values())))


def is_summed(trace: Trace) -> bool:
    """Tell whether every gradient that was audited is the sum that it should be."""
    steps = {(item.name, item.rank): item for item in trace.of(TrainerStep)}
    sums = [item for item in trace.of(GradientSums) if (item.name, item.rank) in steps]
    return all(found.same for found in _all_summed(trace, sums, steps))


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
    """Divisor of the sum of what backward passes gave."""
    return max(step.num_tokens, 1) if item.divisor is None else float(item.divisor)


def _cut(trace: Trace, item: GradientSums, name: str) -> list[np.ndarray]:
    sizes = [tensor.owned if name == "reduced" else tensor.elements for tensor in item.tensors]
    return ragged.split(trace.array(item, name).astype(np.float64), sizes)


def _summed(
    item: GradientSums, tensor: SummedTensor, actual: np.ndarray, parts: np.ndarray, divisor: float
) -> Comparison:
    parts = parts[:, tensor.owned_begin : tensor.owned_begin + tensor.owned] / divisor
    expected, magnitude = parts.sum(0), np.abs(parts).sum(0)
    bounds = (len(parts) + SCALINGS) * (ROUNDING[tensor.dtype] * magnitude + LEAST)
    gap = np.abs(actual - expected)
    worst = int(np.argmax(np.where(np.isfinite(gap), gap / bounds, np.inf)))
    place, bound = tensor.begin + tensor.owned_begin + worst, float(bounds[worst])
    what = f"gradient of {tensor.name} of {item.name} on rank {item.rank}"
    subject = f"the gradient of element {place:,} of `{tensor.name}` that {item.name} gives the optimizer"
    says = "", f"what micro-batches of {len(parts)} ranks gave, divided by {divisor:,}"
    words, same = f"{bound:.3g} ({len(parts) + SCALINGS} roundings of {tensor.dtype})", bool((gap <= bounds).all())
    found, right = float(actual[worst]), float(expected[worst])
    return compare_value(item, what, found, right, same=same, subject=subject, says=says, allowed=words, bound=bound)


def _whole(found: Sequence[tuple[GradientSums, SummedTensor, np.ndarray]], divisor: float) -> Comparison:
    """Compare sums over all elements of one tensor, of all ranks that hold the same weights."""
    item, tensor, _ = found[0]
    given, magnitude, passes, reduced = np.stack([row for _, _, row in found]).T
    times_owned, rest = divmod(sum(own.owned_size for _, own, _ in found), tensor.size)
    scale = max(times_owned, 1) / divisor
    expected, actual = float(given.sum()) * scale, float(reduced.sum())
    count = int(passes.max()) + len(found) + SCALINGS
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
    """Compare the types that gradients are added in with float32, where the config asks for it."""
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


def _normed(step: TrainerStep, rank: int, expected: float) -> Comparison:
    what, bound = f"gradient norm of {step.name} on rank {rank}", NORM.absolute * expected
    says = "the optimizer clips by it", "all ranks' gradients, each counted once, float64"
    hint = "look at what the norm counts twice or leaves out, and over which ranks it is summed"
    return compare_value(step, what, float(step.grad_norm), expected, says=says, allowed=NORM, bound=bound, hint=hint)
