"""Experts that routers choose by themselves while a step is trained, in a run of less than float32."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from verifier.checks.conditions import EXPERTS, GRADIENTS, LOWER, NO_ADAPTER, NOT_REPLAYED, SAMPLED, STEPPED
from verifier.checks.content import times
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import on
from verifier.core.records_tokens import RouterChoices
from verifier.core.stage import Stage
from verifier.core.trace import Trace

NOISES = 4
"""Times the greatest noise of a score that a chosen one may lie below the best: two scores move, in two programs."""
SPARE = 8
"""Tokens that may depart from transformers' groups of experts where transformers' own dtype makes none depart."""


@check(
    "LSS005", needs=(RouterChoices,),
    applies=on(
        roundtrip=EXPERTS & LOWER & NO_ADAPTER & STEPPED & GRADIENTS,
        step=EXPERTS & LOWER & NOT_REPLAYED & SAMPLED,
    ),
)  # fmt: skip
def router_chooses_experts_far_from_the_best(trace: Trace) -> Iterator[Comparison]:
    """In an update in less than fp32, each token's experts are the best ones, but for ties that rounding decides.

    What it checks: the experts that the trainer's routers chose in the update, layer by layer, against the scores that
    transformers in fp32 gives all experts for the same tokens; in the layers before, it takes the trainer's experts.
    The worst chosen expert may score below the K-th best by what rounding moves two scores. Tokens with an expert of a
    group that transformers closes to them (DeepSeek) are counted: one flip of a group is no tie of two experts.
    Why it matters: in less than fp32 gradients are judged under the experts that the trainer chose (LSS001), so a
    router that chooses wrongly in updates alone, by noise, capacity or a stale bias, changes no other comparison.
    Evidence: loss/choices (a measurement by the oracle's process, from the experts that each rank's routers used).
    Tolerance and its source: four times the greatest change of any score of the update by the run's dtype, by
    transformers itself under the same routes: two scores move, and the trainer rounds elsewhere. Clean runs were
    within 0.72 of that change. Of groups twice as many tokens as transformers' own choice in that dtype has, four
    standard deviations, and 8.
    What it does not catch: a choice between experts whose scores are nearer than that; choices in passes that score
    (LGP001) or replay (RPL001); in fp32 LSS001 sees a wrong choice by its gradient.
    References: transformers#41663.
    """
    noises: dict[tuple[int, str], float] = defaultdict(float)
    for item in trace.of(RouterChoices):
        key = item.version, item.name
        noises[key] = max(noises[key], float(item.noise))
    for item in trace.of(RouterChoices):
        allowed = NOISES * noises[item.version, item.name]
        most = 2 * item.closed_in_dtype
        most = math.floor(most + 4 * math.sqrt(most)) + SPARE
        gap, sequence, position = float(item.shortfall), *item.place
        yield Comparison(
            what=f"layer {item.layer}, {item.name}", same=gap <= allowed and item.closed <= most, stage=Stage.LOSS,
            version=item.version, share=max(times(gap, allowed), item.closed / most),
            sentence=f"a router of layer {item.layer} chose an expert that scores {gap:.3g} of the scores' range below "
            f"the best ones, for token {position} of sequence {sequence}"
            + (f"; {item.closed:,} tokens have one of a group that is closed to them" if item.closed > most else ""),
            expected="the best experts by transformers' scores (fp32, the trainer's experts in the layers before)",
            actual=f"off by up to {gap:.3g}; {item.closed:,} of {item.num_tokens:,} tokens outside of their groups",
            allowed=f"{allowed:.3g} of the range ({NOISES} times the noise of a score in the run's dtype), "
            f"{most:,} tokens outside of their groups",
            hint="look at what the router adds to its scores while it trains: noise, a bias, a capacity",
        )  # fmt: skip
