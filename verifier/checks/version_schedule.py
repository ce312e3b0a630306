"""Versions that the sampled tokens of a step claim, against those that the engines' processes held."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.conditions import LIVE, WEIGHTS_SENT
from verifier.checks.named_weights import compare_answers
from verifier.core.check import Comparison, Trace, check
from verifier.core.condition import on, recorded, told
from verifier.core.records_policy import PolicyColumns, RequestSeeds, SamplingAsked
from verifier.core.records_trainer import PreviousStep


@check(
    "DAT015",
    needs=(SamplingAsked, PolicyColumns, PreviousStep),
    applies=on(
        step=LIVE & WEIGHTS_SENT,
        loop=recorded(SamplingAsked, PolicyColumns, RequestSeeds)
        & told("engine versions", "the engine names no version of its weights"),
    ),
)
def version_of_other_weights(trace: Trace) -> Iterator[Comparison]:
    """Sampled tokens claim the version of the weights that sampled them.

    What it checks: per answer, the version that each token claims against the one that the engine's own process says it
    held when it sampled the token: the version that came with its last completed update.
    Why it matters: a rollout that is stamped one version too old is dropped too early, and is compared with nobody's
    weights between sampled steps. Answers that are sampled before a sync, and claim the version after it, are trained
    as if on-policy; in bf16 one update of the weights moves a log-probability by less than noise.
    Evidence: advantage/policy ("version"), train/previous (whether the step before took an update), data/seeds
    ("weights"), data/asked ("sent").
    Tolerance and its source: exact; versions are copied.
    Where to look: what counts versions, and whether answers are sampled before or after a sync.
    What it does not catch: answers that are sampled further ahead than was asked for, beyond the bound of their age
    (ADV003); a transfer that brings other weights than its version says (WGT020, ENG001), or weights that change after
    it (ENG001, ENG009); of engines that get adapters, which adapter (LGP011); in the first step after a resume, older
    weights than a batch from before claims.
    References: prime-rl#1764, rllm#622, cosmos-rl#592.
    """
    for asked in trace.of(SamplingAsked):
        for policy in trace.of(PolicyColumns, version=asked.version):
            yield from compare_answers(trace, asked, policy)
