"""Every update of a training run, on some of its tensors: what the optimizer made of the gradient."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import NO_FSDP, UPDATED
from verifier.checks.content import owner_of, times
from verifier.checks.step import STEP
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import on, recorded
from verifier.core.records_gradients import GradientSums, SummedTensor
from verifier.core.records_trainer import AdamAudit
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("TRN005", needs=(AdamAudit,), applies=on(step=UPDATED & NO_FSDP, loop=recorded(AdamAudit)))
def update_differs_from_adam(trace: Trace) -> Iterator[Comparison]:
    """In every update each rank moves its masters by Adam, with the clipped gradient, and all ranks' passes use them.

    What it checks: per rank and update, on up to 1,024 elements of up to 32 tensors, others in each update: masters
    and moments after it against Adam in float64 from masters, moments and reduced gradient before it, with the rate and
    decay of the tensor's group and the clip factor of the recorded norm; that weights are the masters, rounded to the
    weights' dtype, before it and after it, and before the first update of a process those of all tensors; that the
    gradient was zero before the first pass; that masters, moments and weights of the update before are what it left,
    and that all moments are 0 before the first one of a run; that passes use these weights on every rank, on up to 256
    elements of up to 16 tensors, others in each update, against those of the rank whose optimizer holds them. And that
    every parameter is trained; with adapters, every one of theirs.
    Why it matters: a clip that is computed and not applied, masters that no weight gets, masters that the checkpoint
    never reached and that replace its weights at the first step, a tensor that no step moves and gradients that are
    kept from step to step all give a loss that falls. TRN001 sees them on sampled steps alone, and takes the trainer's
    own moments there: moments that each step leaves rounded it does not see.
    Evidence: train/audit; train/sums for the weights that passes use.
    Tolerance and its source: 1e-3 of the learning rate, as TRN001, beyond three roundings to float32. Of a moment 16
    roundings to float32 of its two terms, and that of its decay, which moves what is left of 1 by as much (Higham 2002,
    section 2.2). All else is bitwise: these are copies.
    What it does not catch: a wrong gradient (LSS001, TRN006), norm (TRN006) or rate (TRN002); tensors whose turn has
    not come; weights that passes use of an adapter, or of a model without a layout, and on sampled steps, before which
    they are gathered for the oracle; runs with Megatron-FSDP, which the report says.
    References: Automodel#576, DeeperSpeed#56, tt-blacksmith#711, RL#3171, trl#3926, Megatron-LM#950, flashoptim#2,
    torchtitan#4382, RL#2371.
    """
    for audit in trace.of(AdamAudit):
        for item in audit.tensors:
            gap = float(item.gap)
            found = f"{gap:.3g} learning rates off" if math.isfinite(gap) else "not finite, unlike"
            yield _compared(
                audit, item.name, same=gap <= STEP.absolute, share=times(gap, STEP.absolute),
                sentence=f"{audit.name} leaves masters of `{item.name}` that are {found} what Adam makes of its "
                "gradient",
                expected="the masters before, moved by Adam (float64, with the trainer's own clipped gradient)",
                actual=f"{found} it (of {item.elements:,} elements from {item.begin:,} on)", allowed=str(STEP),
                hint="look at the clip factor, at moments, and at what the optimizer was given",
            )  # fmt: skip
            rounding = float(item.moments)
            yield _compared(
                audit, f"{item.name} (moments)", same=rounding <= 1, share=times(rounding, 1),
                sentence=f"{audit.name} leaves moments of `{item.name}` that are {rounding:.3g} times what float32 may "
                "round them by off what Adam makes of its gradient",
                expected="the moments before, and the clipped gradient (float64)",
                actual=f"off by {rounding:.3g} times that (of {item.elements:,} elements from {item.begin:,} on)",
                allowed="1, the roundings of float32",
                hint="look at the dtype that moments pass through, and at what resets or writes them after the step",
            )  # fmt: skip
            yield _compared(
                audit, f"{item.name} (weight)", same=item.copied,
                sentence=f"after {audit.name} weights of `{item.name}` are not its masters",
                expected="the masters, rounded to the weights' dtype", actual="other numbers (the live weights)",
                allowed="bitwise (a copy)", hint="look at what copies masters to the model after a step",
            )  # fmt: skip
            if item.left is None:
                continue
            left = float(item.left)
            yield _compared(
                audit, f"{item.name} (gradient)", same=left == 0,
                sentence=f"{audit.name} begins with a gradient of `{item.name}` of up to {left:.3g}",
                expected="0 before the first pass", actual=f"{left:.3g} (the gradient buffer)", allowed="exact",
                hint="look at what zeroes gradients between steps",
            )  # fmt: skip
        yield _compared(
            audit, "state between updates", same=not audit.moved,
            sentence=f"masters, moments or weights of {len(audit.moved)} of {audit.remembered} tensors moved before "
            f"{audit.name}, `{', '.join(audit.moved[:1])}` the first",
            expected="what the update before left", actual="other numbers", allowed="bitwise (nothing writes them)",
            hint="look at what touches the optimizer or the weights between two steps",
        )  # fmt: skip
        yield _compared(
            audit, "masters of the weights", same=not audit.strays,
            sentence=f"before {audit.name} the weights of {len(audit.strays)} tensors are not the optimizer's masters, "
            f"`{', '.join(audit.strays[:1])}` the first",
            expected="the masters, rounded to the weights' dtype", actual="other numbers (the live weights)",
            allowed="bitwise (a copy)",
            hint="look at what loads weights after the optimizer was made, and tells its masters nothing",
        )  # fmt: skip
        if audit.begun_with is not None:
            greatest = float(audit.begun_with)
            yield _compared(
                audit, "moments of a new run", same=greatest == 0,
                sentence=f"{audit.name}, the first of the run, begins with moments of up to {greatest:.3g}",
                expected="0 before any update", actual=f"{greatest:.3g} (the optimizer's state)", allowed="exact",
                hint="look at what makes Adam's state before the first step: a step on nothing, a load",
            )  # fmt: skip
        yield _compared(
            audit, "trained parameters", same=not audit.frozen,
            sentence=f"{len(audit.frozen)} parameters are not trained, `{', '.join(audit.frozen[:1])}` the first",
            expected="every parameter, but for the base of an adapter", actual=f"{len(audit.frozen)} are frozen",
            allowed="exact", hint="look at what sets requires_grad",
        )  # fmt: skip
    yield from compare_used(trace)


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
            bad = np.flatnonzero(own.view(np.int32) != expected.view(np.int32))
            at = int(bad[0]) if len(bad) else 0
            yield Comparison(
                what=f"weights of {tensor.name} in the passes of {item.name} on rank {item.rank}", same=not len(bad),
                stage=Stage.TRAIN, version=item.version, badness=len(bad) / len(own), owner=owner_of(item),
                sentence=f"the passes of {item.name} use {own[at]:.6g} as element {tensor.begin + at:,} of "
                f"`{tensor.name}`, the rank that steps it left {expected[at]:.6g}",
                expected=f"{expected[at]:.6g} (the rank whose optimizer holds it)",
                actual=f"{own[at]:.6g} ({len(bad):,} of {len(own):,} elements differ)", allowed="bitwise (a gather)",
                hint="look at what gathers weights after a step, and at what runs before it",
            )  # fmt: skip


def _compared(
    audit: AdamAudit, what: str, *, same: bool, sentence: str, expected: str, actual: str, allowed: str, hint: str,
    badness: float = 1.0, share: float | None = None,
) -> Comparison:  # fmt: skip
    return Comparison(
        what=f"{what} of {audit.name} on rank {audit.rank}", same=same, stage=Stage.TRAIN, version=audit.version,
        badness=badness, share=share, sentence=sentence, owner=owner_of(audit), expected=expected, actual=actual,
        allowed=allowed, hint=hint,
    )  # fmt: skip
