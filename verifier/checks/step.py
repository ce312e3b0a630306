"""The training step: gradients and what the optimizer makes of them."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator

from verifier.checks.conditions import ADAPTER, COMPARED, GRADIENTS, SAMPLED, STEPPED
from verifier.checks.content import owner_of, times
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.condition import on, recorded
from verifier.core.record import Measurement
from verifier.core.records_tokens import GradientRecord, Objective
from verifier.core.records_weights import KeptGradients, OptimizerRule, StepReport
from verifier.core.stage import Stage
from verifier.core.trace import Trace

GRADIENT = Tolerance(
    absolute=3e-5, unit="of the tensor's greatest gradient",
    source="fp32 on CPU, measured on clean runs of every family and mesh: docs/numerics.md",
)  # fmt: skip
NORM = Tolerance(
    absolute=1e-5, unit="of the norm",
    source="fp32 sums of squares in another order: a trainer's norm was measured within 4e-6 of one rank's",
)  # fmt: skip
GRADIENT_NOISES = 5
"""Times the greatest noise of any tensor that a gradient may be off by, in a run of less than fp32."""
LENGTH_NOISES = 2
"""Times a group's noise, or its layer's, that the length of its gradient may be off by, in a run of less than fp32."""
UPDATE_NOISES = 6
"""The same of updates of a training run, whose gradients may hang on a few tokens; times the greatest such noise."""
LOSS_NOISES = 2
"""Times the mean noise of a token's loss that the loss may be off by, in a run of less than fp32."""
FEW_TOKENS = 10
"""Tokens below which noise of the loss, or of a gradient's length, is not known in a run of less than fp32."""
LOSS_ERRORS = 3
"""Standard errors of that mean noise, which is counted with so much more."""
LOSS = Tolerance(
    absolute=1e-6, unit="of the mean magnitude of a token's loss",
    source="fp32 on CPU, measured on clean runs of every family and mesh: docs/numerics.md",
)  # fmt: skip
STEP = Tolerance(
    absolute=1e-3, unit="learning rates",
    source="beyond three roundings of the weight to float32; those of moments move an update by 3e-5 at most",
)  # fmt: skip


COMPUTED = on(
    roundtrip=(STEPPED | ADAPTER) & GRADIENTS, step=SAMPLED,
    loop=(recorded(KeptGradients) | recorded(GradientRecord)) & COMPARED,
)  # fmt: skip
"""Transformers computes the step too."""


@check("LSS001", needs=(GradientRecord, Objective), applies=COMPUTED)
def gradient_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """Every parameter's gradient, reduced over all ranks, is that of transformers in fp32 on the same tokens.

    What it checks: per checkpoint tensor that transformers has a gradient for, that the trainer has one, and the
    greatest element of their difference, against the tensor's greatest gradient. In less than fp32 also how long the
    trainer's gradient is along transformers': of each tensor, but of all experts of a layer together, which have few
    tokens each. A mixture replays made-up routes in some steps, on both sides; with the step of learning rate 0 the
    first four steps have every combination of replay and recomputation.
    Why it matters: a hook that does not run, a gradient reduced twice or over the wrong group, means of means: the loss
    curve and the norm look the same.
    Evidence: loss/gradient (a measurement by the oracle's process, from the trainer's reduced gradients).
    On sampled steps of a training run (`verify.every`) it is the gradient of the true loss of each update, written
    anew from the papers' formulas, on the tokens and columns that the controller recorded.
    Tolerance and its source: 3e-5 of the tensor's greatest gradient, in fp32; 15 times the greatest of 1,702 clean
    comparisons of a tiny model, whose tail would reach it with 7e-9 if it went on as it begins. Of a loss with
    ratios or a KL term as much more as 1e-5 nats of each log-probability change it by (LGP001), of an entropy at a
    temperature below 1 as much as 1e-5 of every second logit do, and on sampled steps as much as float32 rounds of each
    token's probability: a sure token's gradient is smaller than that. In bf16 five times the run's own noise, the
    greatest of all tensors and updates of the version; gradients are summed in float32 there too. A token that is
    nearer to a clip's edge than three times the noise of log-probabilities is clipped where the trainer's own
    log-probability is beyond it, by which LSS004 judges. A length may be off by twice the tensor's own noise, which is
    how far transformers' gradient in bf16 is from that in fp32, or the median of its layer's tensors', or of the same
    tensor's in all layers, if that is more: a few elements say little of how noisy they are. An update of a training
    run may hang on a few tokens, whose noise in transformers says little of that in the trainer: a length may be off
    there by six times the greatest noise of the same tensor in all layers and updates of the step, or of any tensor in
    the update, whichever is less. Routers flip in bf16, and the gradient of other experts tells nothing: transformers
    takes the experts that rollouts say, or else those that the trainer's own routers chose in that update; in fp32 on
    sampled steps alone, and there where rounding decides. No length is judged of an update in which fewer than ten
    tokens have a gradient: the noise of one token is no measure of another's.
    What it does not catch: parameters that receive no gradient on these tokens, or only from sure ones; in bf16
    routers that choose wrongly by themselves: LGP001 sees those that do so when they score, RPL001 those that do not
    replay, and none sees those that do so in such an update alone.
    References: verl#5702, RL#3716, SkyRL#1751, SkyRL#1296, AReaL#1273, slime#987.
    """
    of_step: dict[int, float] = defaultdict(float)
    for item in trace.of(GradientRecord):
        of_step[item.version] = max(of_step[item.version], float(item.gradient_noise))
    for item in trace.of(GradientRecord):
        gap = math.inf if item.gradient is None else float(item.gradient.value)
        scale, noise, dtype = float(item.gradient_scale), of_step[item.version], item.gradient_dtype
        bound = GRADIENT
        if noise:
            source = (
                f"this run's noise: transformers in the run's dtype against itself in fp32, times {GRADIENT_NOISES}"
            )
            bound = Tolerance(absolute=GRADIENT_NOISES * noise, unit=GRADIENT.unit, source=source)
        allowed = bound.absolute * scale + float(item.gradient_doubt)
        found = f"off by up to {gap:.3g}" if math.isfinite(gap) else "not finite" if item.gradient else "absent"
        found += "" if dtype == "float32" else f", summed in {dtype}"
        owner, place, mismatched = _measured(item.gradient)
        yield Comparison(
            what=_subject(item), same=item.gradient is not None and gap <= allowed and dtype == "float32",
            stage=Stage.LOSS, version=item.version, share=times(gap, allowed),
            sentence=f"the gradient of `{item.name}` is {found}{place}, its greatest element should be {scale:.3g}",
            owner=owner, mismatched=mismatched, expected=f"greatest element {scale:.3g} (transformers' gradient, fp32)",
            actual=f"{found} (the trainer's, reduced over all ranks)", allowed=f"{allowed:.3g} in float32, {bound}",
            hint="look at the reduction of this parameter's gradient and at what divides the loss",
        )  # fmt: skip
    yield from _lengths(trace)


def _lengths(trace: Trace) -> Iterator[Comparison]:
    """One comparison per group of tensors and version, where the run has noise: how long the gradient is."""
    known = (item for item in trace.of(GradientRecord) if item.acting is None or item.acting >= FEW_TOKENS)
    noisy = (item for item in known if item.group and item.group_noise)
    groups = {(item.version, item.update, item.group): item for item in noisy}
    layers: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    kinds: dict[tuple[int, str], list[float]] = defaultdict(list)
    updates: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (version, update, name), item in groups.items():
        layers[version, update, _layer(name)].append(float(item.group_noise))
        kinds[version, _kind(name)].append(float(item.group_noise))
        updates[version, update].append(float(item.group_noise))
    for (version, update, name), item in groups.items():
        of_kind = kinds[version, _kind(name)]
        if update:
            allowed = UPDATE_NOISES * min(max(of_kind), max(updates[version, update]))
            source = "the greatest noise of this tensor in all layers and updates, or of any tensor in this update, "
            source += f"times {UPDATE_NOISES}"
        else:
            others = layers[version, update, _layer(name)], of_kind
            allowed = LENGTH_NOISES * max(float(item.group_noise), *map(statistics.median, others))
            source = "the noise of this tensor in this run, or the median of its layer's or its kind's, "
            source += f"times {LENGTH_NOISES}"
        bound = Tolerance(absolute=allowed, unit="of the gradient's length", source=source)
        length = float(item.group_length)
        gap = abs(length - 1)
        yield Comparison(
            what=f"{name} (length)" + (f" of update {update}" if update else ""),
            same=gap <= bound.absolute, stage=Stage.LOSS, version=version,
            share=times(gap, bound.absolute),
            sentence=f"the gradient of `{name}` is {length:.3g} times as long as it should be",
            expected="1 (along transformers' gradient, fp32)",
            actual=f"{length:.3g} (the trainer's, reduced over all ranks)", allowed=str(bound),
            hint="look at the groups over which this gradient is summed, and at what scales it",
        )  # fmt: skip


def _layer(name: str) -> str:
    """Up to the layer's index; the tensor's own name outside of layers."""
    found = re.match(r".*\.layers\.\d+\.", name)
    return found[0] if found else name


def _kind(name: str) -> str:
    """The tensor's name without its layer's index."""
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


def _subject(item: GradientRecord) -> str:
    """The tensor, and the update where a version may have several."""
    return item.name + _of_update(item)


def _of_update(item: GradientRecord | StepReport) -> str:
    return f" of update {item.update}" if item.update else ""


def _measured(measured: Measurement | None) -> tuple[str, str, str]:
    """Owner of the element with the greatest gap, its place as the end of a clause, and the "mismatched" line."""
    if measured is None:
        return "", "", ""
    at = f" at {list(measured.index)}"
    mismatched = f"greatest gap {float(measured.value):.3g}{at}, measured as {measured.how}"
    if measured.rank is None:
        return "", "", mismatched
    return f"trainer rank {measured.rank} ({measured.coordinate})", at, mismatched


def _reports(trace: Trace) -> Iterator[tuple[StepReport, GradientRecord]]:
    """Each rank's report of a step, with a record of what the oracle says of that step."""
    measured = {(item.version, item.update): item for item in trace.of(GradientRecord)}
    reports = ((report, measured.get((report.version, report.update))) for report in trace.of(StepReport))
    return ((report, item) for report, item in reports if item is not None)


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
    Tolerance and its source: three roundings to float32 of each weight, by its own size, and 1e-3 of the learning rate
    for those of moments, which move an update by 3e-5 at most. In bf16 half a step of that dtype more, from the
    unrounded weights that Adam has: a trainer's fp32 masters. 1e-5 of the norm.
    What it does not catch: a wrong gradient (LSS001); on sampled steps of a training run, whose moments (in bf16 also
    masters) before the step are the trainer's own, what earlier steps did to these, and wrong rates (TRN002).
    References: SkyRL#2149, RL#2371, SkyRL#1403, slime#1152, slime#1775.
    """
    for item in trace.of(GradientRecord):
        if item.step is None:
            continue
        gap = float(item.step.value)
        owner, place, mismatched = _measured(item.step)
        found = f"{gap:.3g} learning rates off" if math.isfinite(gap) else "not finite, unlike"
        yield Comparison(
            what=_subject(item), same=gap <= STEP.absolute, stage=Stage.TRAIN, version=item.version,
            share=times(gap, STEP.absolute),
            sentence=f"`{item.name}` is {found} what Adam makes of its gradient{place}",
            owner=owner, mismatched=mismatched,
            expected="the weight before, moved by Adam (float64, with the trainer's own gradient)",
            actual=f"{found} it (the live weight after the step)", allowed=str(STEP),
            hint="look at masters, moments and the clip factor",
        )  # fmt: skip
    for report, item in _reports(trace):
        actual, right = float(report.grad_norm), float(item.gradient_norm)
        gap, allowed = abs(actual - right), NORM.absolute * right
        yield Comparison(
            what=f"gradient norm on rank {report.rank}{_of_update(report)}", same=gap <= allowed, stage=Stage.TRAIN,
            version=report.version, share=times(gap, allowed), owner=owner_of(report),
            sentence=f"the optimizer clipped by a gradient norm of {actual:.6g}, which is {right:.6g}",
            expected=f"{right:.6g} (of all reduced gradients, float64)",
            actual=f"{actual:.6g} (the optimizer's)", allowed=f"{allowed:.3g}, {NORM}",
            hint="look at which parameters and ranks the norm is summed over",
        )  # fmt: skip


@check("LSS002", needs=(GradientRecord, StepReport), applies=COMPUTED)
def reported_loss_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The loss that a step reports, and the number of tokens that it is a mean of, are the oracle's.

    What it checks: per step and rank, both numbers against transformers on the same tokens and weights.
    Why it matters: what is logged is what people steer by; a sum over one group too many changes no gradient.
    Evidence: train/step ("loss", "num_tokens"), loss/gradient ("loss", "loss_scale", "num_tokens").
    In less than fp32 the oracle's formula takes the trainer's own log-probability of each token, where it is within
    three times the greatest noise of one in the step; so what is left is the noise of entropies, and of tokens beyond.
    Tolerance and its source: the count is exact; the mean is within 1e-6 of the mean magnitude of a token's loss, in
    less than fp32 within twice the mean noise of a token's loss, with three standard errors of it, if that is more. In
    fp32 it may be off by twice what rounding changes each log-probability by, if that is more: a half unit of log Z,
    and of the sum of the exponentials a half unit times the root of the vocabulary. A loss with ratios may be off by
    twice what 1e-5 nats of each log-probability change it by.
    What it does not catch: gradients of another loss than the reported one (LSS001); in less than fp32
    log-probabilities that are off by less than their noise, and a wrong loss of fewer than ten tokens.
    References: SkyRL#1420, verl#3294, slime#987.
    """
    for report, item in _reports(trace):
        loss, right = float(report.loss), float(item.loss)
        by_noise = LOSS_NOISES * (float(item.loss_noise) + LOSS_ERRORS * float(item.loss_noise_error))
        allowed, why = LOSS.absolute * float(item.loss_scale), str(LOSS)
        if allowed < by_noise:
            noise = f"the mean noise of a token's loss, with {LOSS_ERRORS} standard errors (this run's: transformers "
            noise += "in its dtype against itself in fp32)"
            if trace.manifest.dtype == "float32":
                noise = "what rounding, and 1e-5 nats of a ratio's log-probabilities (LGP001), change the loss by"
            allowed, why = by_noise, f"{LOSS_NOISES} times {noise}"
        if trace.manifest.dtype != "float32" and item.num_tokens < FEW_TOKENS:
            allowed, why = math.inf, f"fewer than {FEW_TOKENS} tokens do not tell their noise"
        gap = abs(loss - right)
        yield Comparison(
            what=f"reported loss on rank {report.rank}{_of_update(report)}",
            same=gap <= allowed and report.num_tokens == item.num_tokens, stage=Stage.LOSS,
            version=report.version, share=times(gap, allowed), owner=owner_of(report),
            sentence=f"the step reports a loss of {loss:.6g} over {report.num_tokens:,} tokens, "
            f"it is {right:.6g} over {item.num_tokens:,}",
            expected=f"{right:.6g} over {item.num_tokens:,} tokens (transformers)",
            actual=f"{loss:.6g} over {report.num_tokens:,} tokens (the trainer)",
            allowed=f"{allowed:.3g}, {why}", hint="look at the groups over which loss and tokens are summed",
        )  # fmt: skip
