"""Undertakings of a recorded loop, and the facts of what it recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from verifier.core.manifest import Facts
from verifier.core.record import Record, UnknownRecord, kind_of
from verifier.core.records_policy import Advantages, Drops, PolicyColumns
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
    PlanDigest,
    ReceivedTensor,
)
from verifier.core.trace import Trace

Undertaking = Literal["export", "transfer", "engine weights", "engine logprobs", "policy", "oracle", "gradients"]
"""Something that a loop says in advance it will record."""
UNDERTAKINGS: dict[Undertaking, tuple[type[Record], ...]] = {
    "export": (ExportedTensor, JoinedTensor),
    "transfer": (ReceivedTensor, Handover),
    "engine weights": (CheckpointView, ExpectedView),
    "engine logprobs": (PolicyColumns, SampledTokens, SampledNoise),
    "policy": (PolicyColumns, Advantages, Drops),
    "oracle": (TrainerLogprobs, OracleLogprobs, SampledTokens, OracleOfSampled),
    "gradients": (GradientRecord,),
}
assert tuple(UNDERTAKINGS) == get_args(Undertaking)
KNOWN_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
"""Estimators of advantages that a check has a formula of."""


def facts_of(trace: Trace, undertaken: Sequence[str]) -> Facts:
    """Facts of a recorded loop.

    Args:
        trace: what was recorded.
        undertaken: names of `UNDERTAKINGS`, whose records are declared whatever was recorded.
    """
    found: dict[str, dict[str, set[int]]] = {
        kind_of(kind): {} for name, kinds in UNDERTAKINGS.items() if name in undertaken for kind in kinds
    }
    everything: tuple[Record | UnknownRecord, ...] = (*trace.records, *trace.unknown)
    for item in everything:
        # An engine rank has a plan of what it received; it is compared where the trainer's is there.
        if not isinstance(item, PlanDigest) or item.role == "trainer":
            kind = kind_of(type(item)) if isinstance(item, Record) else item.kind
            found.setdefault(kind, {}).setdefault(f"{item.role} {item.rank}", set()).add(item.version)
    return Facts(
        recorded={kind: {by: tuple(sorted(own)) for by, own in who.items()} for kind, who in found.items()},
        exported=tuple(trace.versions(ExportedTensor)),
        estimators=tuple(dict.fromkeys(item.estimator for item in trace.of(Advantages))),
        lost_logprobs=any(not np.isfinite(trace.array(item)).all() for item in trace.of(SampledTokens)),
    )  # fmt: skip
