"""Experts that routers choose by themselves while a step is trained, in a run of less than float32."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from verifier.checks.conditions import EXPERTS, GRADIENTS, LOWER, NO_ADAPTER, NOT_REPLAYED, SAMPLED, STEPPED
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value, times
from verifier.core.condition import on
from verifier.core.records_tokens import RouterChoices

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
    group that transformers closes to them (DeepSeek) are counted.
    Why it matters: in less than fp32 gradients are judged under the experts that the trainer chose (LSS001), so a
    router that chooses wrongly in updates alone, by noise, capacity or a stale bias, changes no other comparison.
    Evidence: loss/choices (a measurement by the oracle's process, from the experts that each rank's routers used).
    Tolerance and its source: four times the greatest change of any score of the update by the run's dtype, by
    transformers itself under the same routes . Clean runs were within 0.72 of that change. Of groups twice as many
    tokens as transformers' own choice in that dtype has, four standard deviations, and 8.
    Where to look: what the router adds to its scores while it trains: noise, a bias, a capacity.
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
        share, same = max(times(gap, allowed), item.closed / most), gap <= allowed and item.closed <= most
        sentence = f"a router of layer {item.layer} chose an expert that scores {gap:.3g} of the scores' range below "
        sentence += f"the best ones, for token {position} of sequence {sequence}"
        if item.closed > most:
            sentence += f"; {item.closed:,} tokens have one of a group that is closed to them"
        words = f"{allowed:.3g} of the range ({NOISES} times the noise of a score in the run's dtype), {most:,} tokens"
        sides = f"{gap:.3g}; {item.closed:,} of {item.num_tokens:,} tokens outside of their groups", "the best experts"
        at, what = At(Stage.LOSS, item.version), f"layer {item.layer}, {item.name}"
        found = compare_value(at, what, *sides, same=same, sentence=sentence, allowed=words)
        yield replace(found, share=share)
