"""Every update of a training run, on some of its tensors: what the optimizer made of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

from verifier.checks.content import owner_of, times
from verifier.checks.step import STEP
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_trainer import AdamAudit
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("TRN005", needs=(AdamAudit,), scope="audited")
def update_differs_from_adam(trace: Trace) -> Iterator[Comparison]:
    """In every update each rank moves its masters by Adam, with the clipped gradient of this step, and copies them.

    What it checks: per rank and update, on up to 1,024 elements of up to 32 tensors, others in each update: masters
    after it against Adam in float64 from masters, moments and reduced gradient before it, with the rate and decay of
    the tensor's group and the clip factor of the recorded norm; that weights are the masters, rounded to the weights'
    dtype; that the gradient was zero before the first pass; that masters, moments and weights of the update before are
    what it left. And that every parameter is trained; with adapters, every one of theirs.
    Why it matters: a clip that is computed and not applied, masters that no weight gets, a tensor that no step moves
    and gradients that are kept from step to step all give a loss that falls. TRN001 sees them on sampled steps alone.
    Evidence: train/audit.
    Tolerance and its source: 1e-3 of the learning rate, as TRN001, beyond three roundings to float32. All else is
    bitwise: these are copies.
    What it does not catch: a wrong gradient (LSS001, TRN006), norm (TRN006) or rate (TRN002); tensors whose turn has
    not come; runs with Megatron-FSDP or an optimizer on the host, which the report says.
    References: Automodel#576, DeeperSpeed#56, tt-blacksmith#711, RL#3171, trl#3926.
    """
    for audit in trace.of(AdamAudit):
        for item in audit.tensors:
            gap = float(item.gap)
            found = f"{gap:.3g} learning rates off" if math.isfinite(gap) else "not finite, unlike"
            yield _compared(
                audit, item.name, same=gap <= STEP.absolute, badness=times(gap, STEP.absolute),
                sentence=f"{audit.name} leaves masters of `{item.name}` that are {found} what Adam makes of its "
                "gradient",
                expected="the masters before, moved by Adam (float64, with the trainer's own clipped gradient)",
                actual=f"{found} it (of {item.elements:,} elements from {item.begin:,} on)", allowed=str(STEP),
                hint="look at the clip factor, at moments, and at what the optimizer was given",
            )  # fmt: skip
            yield _compared(
                audit, f"{item.name} (weight)", same=item.copied,
                sentence=f"after {audit.name} weights of `{item.name}` are not its masters",
                expected="the masters, rounded to the weights' dtype", actual="other numbers (the live weights)",
                allowed="bitwise (a copy)", hint="look at what copies masters to the model after a step",
            )  # fmt: skip
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
            audit, "trained parameters", same=not audit.frozen,
            sentence=f"{len(audit.frozen)} parameters are not trained, `{', '.join(audit.frozen[:1])}` the first",
            expected="every parameter, but for the base of an adapter", actual=f"{len(audit.frozen)} are frozen",
            allowed="exact", hint="look at what sets requires_grad",
        )  # fmt: skip


def _compared(
    audit: AdamAudit, what: str, *, same: bool, sentence: str, expected: str, actual: str, allowed: str, hint: str,
    badness: float = 1.0,
) -> Comparison:  # fmt: skip
    return Comparison(
        what=f"{what} of {audit.name} on rank {audit.rank}", same=same, stage=Stage.TRAIN, version=audit.version,
        badness=badness, sentence=sentence, owner=owner_of(audit), expected=expected, actual=actual, allowed=allowed,
        hint=hint,
    )  # fmt: skip
