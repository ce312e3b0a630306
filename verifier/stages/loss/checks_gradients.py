"""Gradients and losses against transformers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from verifier.core.check import LOOP, At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value, owner_of
from verifier.core.condition import on, recorded
from verifier.core.record import Measurement
from verifier.stages.advantage.records import LossColumns
from verifier.stages.checks_conditions import ADAPTER, COMPARED, GRADIENTS, SAMPLED, STEPPED
from verifier.stages.checks_parts import parts_of
from verifier.stages.logprob.records import ROUNDINGS
from verifier.stages.loss.records import GradientRecord, KeptGradients, Objective, in_all_layers
from verifier.stages.train.records import StepReport

GRADIENT = Tolerance(
    absolute=3e-5, unit="of the tensor's greatest gradient",
    source="fp32 on CPU, measured on clean runs of every family and mesh: docs/numerics.md",
)  # fmt: skip
GRADIENT_NOISES = 5
"""Times the greatest noise of any tensor that a gradient may be off by, in a run of less than fp32 (ADR 0102)."""
LENGTH_NOISES = 6
"""Times the greatest noise of a group's kind that the length of its gradient may be off by, in a run of less than
fp32."""
LOSS_NOISES = 2
"""Times the mean noise of a token's loss that the loss may be off by, in a run of less than fp32."""
KNOWN = 0.5
"""Greatest noise of a gradient, of its length, up to which one of exactly zero is wrong: no rounding makes it so."""
FEW_TOKENS = 10
"""Tokens below which noise of the loss, or of a gradient's length, is not known in a run of less than fp32."""
LOSS_ERRORS = 3
"""Standard errors of that mean noise, which is counted with so much more."""
LOSS = Tolerance(
    absolute=1e-6, unit="of the mean magnitude of a token's loss",
    source="fp32 on CPU, measured on clean runs of every family and mesh: docs/numerics.md",
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
    tokens each. A layer for a further token (MTP) is built of transformers' parts (docs/adr/0117). A mixture replays
    made-up routes in some steps, on both sides; with the step of learning rate 0 the first four steps have every
    combination of replay and recomputation.
    Why it matters: a hook that does not run, a gradient reduced twice or over the wrong group, means of means: the loss
    curve and the norm look the same.
    Evidence: loss/gradient (a measurement by the oracle's process, from the trainer's reduced gradients). On sampled
    steps of a training run (`verify.every`) it is the gradient of the true loss of each update, written anew from the
    papers' formulas, on the tokens and columns that the controller recorded. Of a step of more than 16,384 tokens, or
    with `verify.rollouts`, it is that of some rollouts, which the trainer computes in a pass of their own before the
    step, with the step's weights of tokens; the comparison says how many of how many.
    Tolerance and its source: 3e-5 of the tensor's greatest gradient in fp32, measured (docs/numerics.md); an
    extrapolated 7e-9 of clean comparisons reach it. Where a gradient is beyond a third of that, as in deep trained
    models, 12 times the greatest of up to 24 distances of transformers in float32 from float64, if that is more: a
    chance of 1e-17 a step where one direction dominates, 3e-11 at four times the variance (ADRs 0103, 0109). More
    by what 1e-5 nats of each log-probability change it by, of a loss with ratios or a KL term, and by what float32
    rounds of a sure token's probability on sampled steps. In bf16 five times the run's own noise: the greatest of
    all tensors and updates of the version, by one pass of transformers, or by up to 24, each rounded anew, where a
    gradient is not near: a chance of 9e-10 a step where one direction dominates, 3e-5 at four times the variance
    (ADR 0109). A length may be off by six times the greatest noise of its kind, or of any tensor in the update,
    whichever is less; and where one pass did not show it to be near, by twelve times the greatest noise of the
    tensor itself in all passes, as in fp32. A length of exactly zero is wrong, unless a pass was off by half of the
    length. It is not judged of fewer than ten tokens with a gradient. Near a
    clip's edge the trainer's own log-probability decides, by which LSS004 judges; where routers flip, transformers
    takes the trainer's experts.
    Where to look: the reduction of this parameter's gradient, the groups over which it is summed, and what divides the
    loss.
    What it does not catch: parameters that receive no gradient on these tokens, or only from sure ones; a bug that
    needs a rollout which is not among some: of a share p of all, K miss it with a chance of (1 - p)**K; in bf16 routers
    that choose wrongly by themselves (LGP001, RPL001, LSS005).
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
            source = f"this run's noise: transformers in its dtype against itself in fp32, times {GRADIENT_NOISES}"
            bound = Tolerance(absolute=GRADIENT_NOISES * noise, unit=GRADIENT.unit, source=source)
        allowed, rounding = bound.absolute * scale, ROUNDINGS * float(item.gradient_rounding)
        words = str(bound)
        if rounding > allowed:
            words = f"{ROUNDINGS:g} x the scale of float32's rounding, transformers against itself in float64"
        allowed = max(allowed, rounding) + float(item.gradient_doubt)
        found = f"off by up to {gap:.3g}" if math.isfinite(gap) else "not finite" if item.gradient else "absent"
        wide = dtype == "float32" or trace.manifest.command == LOOP  # whose weights' dtype its gradients have
        found += "" if wide else f", summed in {dtype}"
        owner, place, mismatched = measured_at(item.gradient)
        same = item.gradient is not None and gap <= allowed and wide
        at, what, sides = (
            At(Stage.LOSS, item.version, owner),
            subject_of(item) + some_of(item),
            (found, f"greatest element {scale:.3g}"),
        )
        sentence = f"the gradient of `{item.name}` is {found}{place}, its greatest element should be {scale:.3g}"
        texts: Given = {"says": ("the trainer's", "transformers' gradient, fp32"), "mismatched": mismatched}
        words = f"{allowed:.3g} in float32, {words}"
        yield compare_value(
            at, what, *sides, same=same, sentence=sentence, allowed=words, bound=allowed, gap=gap, **texts
        )
    yield from _lengths(trace)


def _lengths(trace: Trace) -> Iterator[Comparison]:
    """One comparison per group of tensors and version, where the run has noise: how long the gradient is."""
    known = (item for item in trace.of(GradientRecord) if item.acting is None or item.acting >= FEW_TOKENS)
    noisy = (item for item in known if item.group and item.group_noise)
    groups = {(item.version, item.update, item.group): item for item in noisy}
    kinds: dict[tuple[int, str], float] = defaultdict(float)
    updates: dict[tuple[int, int], float] = defaultdict(float)
    for (version, update, name), item in groups.items():
        noise = float(item.group_noise)
        kinds[version, in_all_layers(name)] = max(kinds[version, in_all_layers(name)], noise)
        updates[version, update] = max(updates[version, update], noise)
    for (version, update, name), item in groups.items():
        allowed = LENGTH_NOISES * min(kinds[version, in_all_layers(name)], updates[version, update])
        source = "the greatest noise of this tensor in all layers and updates, or of any tensor in this update, "
        source += f"times {LENGTH_NOISES}"
        own = ROUNDINGS * float(item.group_noise)
        if item.noise_passes > 1 and own > allowed:
            allowed = own
            source = f"the greatest noise of this tensor in {item.noise_passes} passes, times {ROUNDINGS:g}"
        length = float(item.group_length)
        if length == 0.0 and float(item.group_noise) < KNOWN < allowed:
            allowed, source = KNOWN, "no rounding makes a gradient exactly zero"
        bound = Tolerance(absolute=allowed, unit="of the gradient's length", source=source)
        what = f"{name} (length)" + of_update(item) + some_of(item)
        subject = f"the length of the gradient of `{name}`"
        says = ("the trainer's", "along transformers' gradient, fp32")
        yield compare_value(At(Stage.LOSS, version), what, length, 1.0, subject=subject, says=says, allowed=bound)


def subject_of(item: GradientRecord) -> str:
    """The tensor, and the update where a version may have several."""
    return item.name + of_update(item)


def of_update(item: GradientRecord | StepReport) -> str:
    """The update as the end of a noun phrase, where a version may have several."""
    return f" of update {item.update}" if item.update else ""


def some_of(item: GradientRecord) -> str:
    """Number of the update's rollouts that it is of, in brackets; empty where it is of all."""
    return f" ({item.rollouts:,} of {item.of_rollouts:,} rollouts)" if item.of_rollouts else ""


def measured_at(measured: Measurement | None) -> tuple[str, str, str]:
    """Owner of the element with the greatest gap, its place as the end of a clause, and the "mismatched" line."""
    if measured is None:
        return "", "", ""
    at = f" at {list(measured.index)}"
    mismatched = f"greatest gap {float(measured.value):.3g}{at}, measured as {measured.how}"
    if measured.rank is None:
        return "", "", mismatched
    return f"trainer rank {measured.rank} ({measured.coordinate})", at, mismatched


def reports_judged(trace: Trace) -> Iterator[tuple[StepReport, GradientRecord]]:
    """Each rank's report of a step, with a record of what the oracle says of that step."""
    measured = {(item.version, item.update): item for item in trace.of(GradientRecord)}
    reports = ((report, measured.get((report.version, report.update))) for report in trace.of(StepReport))
    return ((report, item) for report, item in reports if item is not None)


@check("LSS002", needs=(GradientRecord, StepReport), applies=COMPUTED)
def reported_loss_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The loss that a step reports, and the number of tokens that it is a mean of, are the oracle's.

    What it checks: per step and rank, both numbers against transformers on the same tokens and weights. In less than
    fp32 the oracle's formula takes the trainer's own log-probability of each token, where it is within six times the
    greatest noise of one in the step. Of ranks of a recorded loop whose counts add up to the oracle's, the mean of
    their losses, or their sum where gradients are summed. Where a layer for a further token (MTP) is trained, also the
    mean cross-entropy of its tokens and their number, by the layer that the oracle builds.
    Why it matters: what is logged is what people steer by; a sum over one group too many changes no gradient.
    Evidence: train/step ("loss", "num_tokens", "further_loss", "num_further"), loss/gradient (the same, "loss_scale").
    Tolerance and its source: the count is exact; the mean is within 1e-6 of the mean magnitude of a token's loss. In
    less than fp32 within twice the mean noise of a token's loss, with three standard errors of it, if that is more; in
    fp32 within twice what rounding, and of a loss with ratios 1e-5 nats of each log-probability, change it by, if that
    is more (docs/numerics.md).
    Where to look: the groups over which loss and tokens are summed.
    What it does not catch: gradients of another loss than the reported one (LSS001); where some rollouts are computed
    (`verify.rollouts`), whose own loss it is, the sum over the others (LSS004 has each token's); in less than fp32
    log-probabilities that are off by less than their noise, and a wrong loss of fewer than ten tokens.
    References: SkyRL#1420, verl#3294, slime#987.
    """
    judged = [*reports_judged(trace)]
    for report, item in judged:
        places = {rank: at for at, part in enumerate(parts_of(trace, report.version)) for rank in part.ranks}
        alike = [other for other, same in judged if same is item and trace.manifest.command == LOOP]
        own = {places.get(other.rank, -1 - other.rank): other for other in alike}.values()
        loss, right, count = float(report.loss), float(item.loss), report.num_tokens
        if count != item.num_tokens and sum(other.num_tokens for other in own) == item.num_tokens:
            columns = next(trace.of(LossColumns, version=report.version), None)
            divisor = (columns and columns.gradient_divisor) or len(own)
            loss, count = math.fsum(float(other.loss) for other in own) / divisor, item.num_tokens
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
        numbers = [("reported loss", loss, right, count, item.num_tokens, allowed, why)]
        if report.num_further or item.num_further:
            loss, right = float(report.further_loss), float(item.further_loss)
            allowed = max(LOSS.absolute * right, LOSS_NOISES * float(item.further_noise))
            why = f"{LOSS}, or {LOSS_NOISES} times what rounding changes it by"
            counts = (report.num_further, item.num_further)
            numbers.append(("reported loss of further tokens", loss, right, *counts, allowed, why))
        for what, loss, right, count, wanted, allowed, why in numbers:
            gap, same = abs(loss - right), count == wanted and abs(loss - right) <= allowed
            yield compare_value(
                At(Stage.LOSS, report.version, owner_of(report)),
                f"{what} on rank {report.rank}{of_update(report)}{some_of(item)}",
                f"{loss:.6g} over {count:,} tokens", f"{right:.6g} over {wanted:,} tokens",
                same=same, allowed=f"{allowed:.3g}, {why}", bound=allowed, gap=gap,
            )  # fmt: skip
