"""Ends of a training step's answers: as many as fair draws give, wherever an end token could be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import ENDS, FRESH, SAMPLED
from verifier.checks.draws import ERRORS
from verifier.checks.logprob_bounds import GREATEST_NOISES
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import condition, knob, on, recorded
from verifier.core.records_policy import SamplingAsked
from verifier.core.records_tokens import OracleEnds, SampledTokens

WHOLE_DRAWS = condition(
    "answers are replaced for what was sampled, or the engine draws from rounded weights",
    lambda run: knob(run, "grpo.max_sampling_rounds") == 1 and not knob(run, "engine.quantization"),
)  # fmt: skip


@check(
    "LGP014",
    needs=(SamplingAsked, SampledTokens, OracleEnds),
    applies=on(step=FRESH & WHOLE_DRAWS & SAMPLED, loop=recorded(SamplingAsked, SampledTokens) & ENDS),
)
def answers_end_unfairly(trace: Trace) -> Iterator[Comparison]:
    """Answers end as often as draws from the policy do: they are all that were drawn, whatever their length.

    What it checks: on sampled steps of a training run (`verify.every`), over all tokens that the weights before the
    step sampled, the number of end tokens among them against the sum of the probabilities that transformers in fp32
    gives an end token at each, at the run's temperature.
    Why it matters: an engine that is asked for more answers than are trained on, and keeps those that end first, gives
    each token its right log-probability, and the policy learns from short answers alone.
    Evidence: data/asked, rollout/sampled, logprob/ends (array).
    Tolerance and its source: six times the root of a third of the sum of squares and two thirds of the sum of variances
    (Delyon 2009), and three times what the run's dtype changes of the probabilities.
    Where to look: which of the answers that were drawn are handed on: the first to finish, the shortest.
    What it does not catch: a choice by anything but length; one of few answers ; any where the weights leave no choice
    of a length. Steps between the sampled ones; steps with several rounds of sampling; quantized engines; tokens of
    older weights.
    References: verl#2929.
    """
    for asked in trace.of(SamplingAsked):
        for oracle in trace.of(OracleEnds, version=asked.version - 1):
            for sampled in trace.of(SampledTokens, version=oracle.version, name=oracle.name):
                yield _compare(asked, oracle, trace.array(oracle), sampled)


def _compare(asked: SamplingAsked, oracle: OracleEnds, chance: np.ndarray, sampled: SampledTokens) -> Comparison:
    ended = np.isin(np.array([token for own in sampled.tokens for token in own]), oracle.ends)
    if len(ended) != len(chance):
        raise LookupError(f"the oracle gave {len(chance):,} probabilities of an end for {len(ended):,} tokens")
    if not {asked.end, *asked.other_ends} <= {*oracle.ends}:
        raise LookupError(f"the oracle added the probabilities of {oracle.ends}, an answer ends at {asked.end} too")
    above = ended - chance
    deviation = math.sqrt(float((above**2).sum()) / 3 + 2 * float((chance * (1 - chance)).sum()) / 3)
    allowed = ERRORS * deviation + GREATEST_NOISES * float(oracle.noise)
    total = float(above.sum())
    sentence = f"{int(ended.sum()):,} answers or turns end within {len(ended):,} sampled tokens, of fair draws "
    sentence += (
        f"{float(chance.sum()):.4g} would: the answers are {'shorter' if total > 0 else 'longer'} than draws are"
    )
    words = f"{allowed:.3g}, {ERRORS:g} deviations of fair draws and {GREATEST_NOISES} times this run's noise"
    at, what, says = At(Stage.ROLLOUT, asked.version, "engine"), "ends of the answers", ("", "transformers in fp32")
    found, right, gap = float(ended.sum()), float(chance.sum()), abs(total)
    return compare_value(at, what, found, right, sentence=sentence, says=says, allowed=words, bound=allowed, gap=gap)
