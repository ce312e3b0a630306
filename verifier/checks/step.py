"""The training step: gradients and what the optimizer makes of them."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.stage import Stage
from verifier.core.trace import Trace

GRADIENT_BOUND = 1e-4
"""Of a tensor's greatest gradient. Measured on clean runs of every family and mesh: see docs/numerics.md."""
STEP_BOUND = 1e-3
"""Of the learning rate. Measured likewise; one fp32 rounding of a weight near 1 is 6e-5 of a learning rate of 1e-3."""


@check("LSS001", needs=((Stage.LOSS, "gradient"),), scope="gradient")
def gradient_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """Every parameter's gradient, reduced over all ranks, is that of transformers in fp32 on the same tokens.

    What it checks: per checkpoint tensor, the greatest element of the difference, against the tensor's greatest
    gradient; names both ways.
    Why it matters: a hook that does not run, a gradient reduced twice or over the wrong group, means of means: the loss
    curve and the norm look the same.
    Evidence: loss/gradient (measured by the oracle's process from the trainer's reduced gradients).
    Tolerance and its source: 1e-4 of the tensor's greatest gradient; clean runs stay below a tenth of it.
    What it does not catch: parameters that receive no gradient on these tokens.
    References: verl#5702, RL#3716, SkyRL#1751, SkyRL#1296, AReaL#1273, slime#987.
    """
    for item in trace.at(Stage.LOSS, "gradient"):
        gap, scale = item.facts.get("gradient_gap"), float(item.facts["gradient_scale"])
        allowed = GRADIENT_BOUND * scale
        same = gap is not None and float(gap) <= allowed
        yield Comparison(
            what=item.name, same=same, stage=Stage.LOSS, version=item.version,
            badness=0.0 if same else (1.0 if gap is None else float(gap) / max(allowed, 1e-30)),
            sentence="" if same else (
                f"the gradient of `{item.name}` is absent" if gap is None
                else f"the gradient of `{item.name}` is off by up to {gap:.3g}, its greatest element is {scale:.3g}"
            ),
            expected="transformers' gradient, fp32", actual="absent" if gap is None else f"off by {gap:.3g}",
            allowed=f"{allowed:.3g} (1e-4 of the tensor's greatest gradient, measured on clean runs)",
            hint="look at the reduction of this parameter's gradient and at what divides the loss",
        )  # fmt: skip


@check("TRN001", needs=((Stage.LOSS, "gradient"),), scope="gradient")
def step_differs_from_adam(trace: Trace) -> Iterator[Comparison]:
    """After every step each live weight is the one before it, moved by Adam with the gradient that was there.

    What it checks: per checkpoint tensor, live weights after the step against Adam in float64 from the trainer's own
    reduced gradients, its clip factor and the oracle's own moments.
    Why it matters: masters that were not refreshed, moments that were lost, a clip by the wrong norm.
    Evidence: loss/gradient ("step_gap", in units of the learning rate).
    Tolerance and its source: 1e-3 of the learning rate; fp32 rounding of weights and moments, measured on clean runs.
    What it does not catch: a wrong gradient (LSS001).
    References: SkyRL#2149, RL#2371, SkyRL#1403.
    """
    for item in trace.at(Stage.LOSS, "gradient"):
        gap = item.facts.get("step_gap")
        if gap is None:
            continue
        same = float(gap) <= STEP_BOUND
        yield Comparison(
            what=item.name, same=same, stage=Stage.TRAIN, version=item.version,
            badness=0.0 if same else float(gap) / STEP_BOUND,
            sentence="" if same else f"`{item.name}` is {gap:.3g} learning rates off what Adam makes of its gradient",
            expected="Adam in float64", actual=f"off by {gap:.3g} learning rates",
            allowed=f"{STEP_BOUND:g} learning rates (fp32 rounding, measured on clean runs)",
            hint="look at masters, moments and the clip factor",
        )  # fmt: skip
