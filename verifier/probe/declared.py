"""Scopes of a recorded loop: those that its evidence, and what it undertook to record, give a subject."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from verifier.core.manifest import Scope
from verifier.core.records_policy import Advantages, Drops, PolicyColumns, SamplingAsked
from verifier.core.records_tokens import (
    GradientRecord,
    OracleLogprobs,
    OracleOfSampled,
    SampledNoise,
    SampledTokens,
    TrainerLogprobs,
)
from verifier.core.records_weights import (
    CheckpointView,
    ExpectedView,
    ExportedTensor,
    Handover,
    JoinedTensor,
    KeptGradients,
    PlanDigest,
    PlannedTensor,
    ReceivedTensor,
    SourceTensor,
    Update,
)
from verifier.core.trace import Trace

Undertaking = Literal["export", "transfer", "engine weights", "engine logprobs", "policy", "oracle", "gradients"]
"""Something that a loop says in advance it will record."""
UNDERTAKINGS: dict[Undertaking, tuple[Scope, ...]] = {
    "export": ("order", "joined"),
    "transfer": ("transport",),
    "engine weights": ("held",),
    "engine logprobs": ("mismatch",),
    "policy": ("dropped",),
    "oracle": ("scored", "sampled"),
    "gradients": ("gradient",),
}
assert tuple(UNDERTAKINGS) == get_args(Undertaking)
KNOWN_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
"""Estimators of advantages that a check has a formula of."""


def scopes_of(trace: Trace, undertaken: Sequence[str]) -> tuple[Scope, ...]:
    """Scopes of a recorded loop, in the order of their first reason.

    Args:
        trace: what was recorded.
        undertaken: names of `UNDERTAKINGS`, whose scopes are declared whatever was recorded.
    """
    promised = [scope for name, scopes in UNDERTAKINGS.items() if name in undertaken for scope in scopes]
    return tuple(dict.fromkeys([*promised, *_recorded(trace)]))


def _recorded(trace: Trace) -> Iterator[Scope]:
    """Scopes whose evidence is there."""
    exported = trace.versions(ExportedTensor)
    if trace.has(SourceTensor) and 0 in exported:
        yield "untouched"
    if len(exported) > 1:
        yield "order"
    if trace.has(JoinedTensor) and exported:
        yield "update" if trace.has(Update) else "joined"
    if trace.has(ReceivedTensor) or trace.has(Handover):
        yield "transport"
    if any(item.role == "trainer" for item in trace.of(PlanDigest, rank=0)):
        yield "sent"
    if trace.has(PlannedTensor) and trace.has(SourceTensor):
        yield "planned"
    if trace.has(CheckpointView) and trace.has(ExpectedView):
        yield "held"
    if trace.has(PolicyColumns) and trace.has(SampledTokens) and (_has_floor(trace) or _not_finite(trace)):
        yield "mismatch"
    if trace.has(PolicyColumns) and trace.has(Advantages) and trace.has(Drops):
        yield "dropped"
        if any(item.estimator in KNOWN_ESTIMATORS for item in trace.of(Advantages)):
            yield "estimator"
        if trace.has(SamplingAsked):
            yield "ends"
    if trace.has(TrainerLogprobs) and trace.has(OracleLogprobs):
        yield "scored"
    if trace.has(SampledTokens) and trace.has(OracleOfSampled):
        yield "sampled"
    if trace.has(GradientRecord):
        yield "gradient"


def _has_floor(trace: Trace) -> bool:
    """Tell whether it is known what trainer and engine may differ by."""
    return trace.manifest.dtype == "float32" or trace.has(SampledNoise)


def _not_finite(trace: Trace) -> bool:
    """Tell whether an engine gave a sampled token no finite log-probability, which no noise excuses."""
    return any(not np.isfinite(trace.array(item)).all() for item in trace.of(SampledTokens))


def not_judged(trace: Trace) -> Iterator[str]:
    """Clauses on evidence that no check can judge as the trace stands."""
    if trace.has(TrainerLogprobs) and not trace.has(OracleLogprobs):
        yield "log-probabilities were not scored by transformers (`verifier judge --oracle` does)"
    if trace.has(KeptGradients) and not trace.has(GradientRecord):
        yield "gradients were not compared with transformers' (`verifier judge --oracle` does)"
    noisy = trace.manifest.dtype not in ("", "float32")
    if trace.has(PolicyColumns) and trace.has(SampledTokens) and noisy and not trace.has(SampledNoise):
        yield f"trainer against engine was not judged: no noise of {trace.manifest.dtype} was measured"
    if trace.has(CheckpointView) and not trace.has(ExpectedView):
        yield "engine weights were not judged: an engine rank holds parts of tensors, or another dtype"
