"""Log-probabilities of the engine and of its sampler against the fp32 oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from verifier.core.check import Comparison, Trace, check
from verifier.core.condition import on, recorded
from verifier.stages.checks_conditions import EXPORTS, SAMPLED, SCORED, SYNCED
from verifier.stages.logprob.checks_logprobs import ORACLE, bounds_of, compare_one, compare_with_oracle
from verifier.stages.logprob.records import (
    OracleLogprobs,
    OracleOfNext,
    OracleOfSampled,
    OracleOfShaped,
    TrainerLogprobs,
)
from verifier.stages.rollout.records import DrawnTokens, EngineLogprobs, SampledTokens, ShapedTokens

SAMPLER = "the engine's sampler"


def following(trace: Trace, drawn: DrawnTokens) -> OracleOfNext:
    """The oracle's distribution, over the whole vocabulary, of what was drawn."""
    for item in trace.of(OracleOfNext, name=drawn.name, version=drawn.version):
        return item
    raise LookupError(f"nobody gave the distribution of `{drawn.name}` of version {drawn.version}")


def _of_drawn(nats: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities of drawn tokens; minus infinity beyond the vocabulary."""
    return np.array([nats[token] if token < len(nats) else -math.inf for token in tokens], np.float64)


@check(
    "LGP002",
    needs=(EngineLogprobs, OracleLogprobs),
    applies=on(roundtrip=EXPORTS, loop=recorded(EngineLogprobs) & SCORED),
)
def engine_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The engine scores tokens as transformers in fp32 does with the trainer's weights, before and after each sync.

    What it checks: teacher-forced log-probabilities, token by token; of conversations too, of which the engine's prefix
    cache holds the beginning.
    Why it matters: it sees what the engine computes, whatever its tensors look like.
    Evidence: rollout/engine, logprob/oracle (arrays).
    Tolerance and its source: as LGP001.
    Where to look: what its forward reads besides, if the engine's tensors are right: caches, buffers, config.
    What it does not catch: what no scored token exercises (ENG001).
    References: SkyRL#1680, trl#5312, vllm#44371, vllm#42019.
    """
    return compare_with_oracle(trace, EngineLogprobs, OracleLogprobs, "the engine", third=TrainerLogprobs)


@check(
    "LGP003", needs=(SampledTokens, OracleOfSampled, ShapedTokens, OracleOfShaped),
    applies=on(roundtrip=EXPORTS, step=SYNCED & SAMPLED, loop=recorded(SampledTokens, OracleOfSampled)),
)  # fmt: skip
def sampled_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The log-probabilities reported with sampled tokens are those of the synced weights.

    What it checks: tokens generated from prompts of several cache blocks, which were filled before the sync, scored
    again by the oracle; tokens generated from them once more, when the cache holds them and samples end one after
    another; and two samples each of the conversations' next turn, whose beginning the engine itself sampled. One prompt
    begins as another does, one says in its midst what another says there, and one grows into a further block. At
    version 0 also tokens sampled side by side at several temperatures, whose log-probabilities are those of the logits
    divided by it; a greedy one's are the greatest. In fp32 also tokens whose requests ask for penalties, biases,
    allowed tokens and truncation, and the samples that LGP004 counts. On sampled steps of a training run every sampled
    token, or those of some rollouts (`verify.rollouts`), by the weights of the version that the token claims.
    Why it matters: a prefix cache that outlives its weights answers from the old policy; log-probabilities of another
    distribution than was sampled from make every importance ratio wrong.
    Evidence: rollout/sampled, logprob/sampled-oracle, rollout/shaped, logprob/shaped-oracle, rollout/drawn,
    logprob/next (arrays).
    Tolerance and its source: as LGP001; where rounding decides which tokens a truncation keeps, from the nearest.
    Where to look: caches that were filled before the sync (prefix blocks, graphs); penalties, biases and truncation;
    and which request or sample of a batch is given whose log-probabilities.
    What it does not catch: staleness of prompts shorter than a block (there is no cache entry); a greedy sample of
    another token that is reported as the likeliest.
    References: vLLM `reset_prefix_cache`, SkyRL#1212, verl#7511, vllm#394, vllm#14301, vllm#16863, RL#3497.
    """
    yield from compare_with_oracle(trace, SampledTokens, OracleOfSampled, SAMPLER)
    if trace.manifest.dtype != "float32":  # noise moves the edge of a truncated distribution
        return
    yield from compare_with_oracle(trace, ShapedTokens, OracleOfShaped, SAMPLER)
    for item in trace.of(DrawnTokens):
        asked = item.stage, item.name, item.version, [len(item.tokens)]
        bound = bounds_of(trace, *asked, temperatures=[item.temperature]).greatest[0]
        expected = _of_drawn(trace.array(following(trace, item)), item.tokens)
        yield compare_one(item, "samples", trace.array(item), expected, bound, (SAMPLER, ORACLE))
