"""Reference of the next token's distribution under a request: penalties, biases, truncation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from verifier.engine.api import Sampling


def shaped(
    logits_V: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, slack: float = 0.0,
    spared: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the log-probabilities [V] of the next token under a request; temperature 0 counts as 1.

    `answer` has the tokens sampled so far. `slack` is a bound on rounding, in nats and fractions: truncation keeps more
    (above 0) or fewer (below 0) tokens, and never takes away the one that is `spared`.

    Source:
        vLLM's documentation of `SamplingParams`, and the order of its `Sampler`: allowed tokens, least length, bias,
        penalties, temperature, min-p, top-k, top-p.
    """
    shape, found = sampling.shape, logits_V.clone()
    if shape.allowed:
        kept = torch.zeros_like(found, dtype=torch.bool)
        kept[list(shape.allowed)] = True
        found[~kept] = -torch.inf
    if len(answer) < shape.least:
        found[[*sampling.stop, *sampling.ends]] = -torch.inf
    for token, nats in shape.bias:
        found[token] += nats
    for token in {*prompt, *answer} if shape.repetition != 1 else ():
        found[token] *= 1 / shape.repetition if found[token] > 0 else shape.repetition
    for token, count in Counter(answer).items():
        found[token] -= shape.frequency * count + shape.presence
    found = torch.log_softmax(found / (sampling.temperature or 1.0), dim=-1)
    if shape.min_p:
        found = _only(found, found.exp() >= shape.min_p * found.max().exp() * (1 - slack), spared)
    if 0 < shape.top_k < len(found):
        last, next_one = found.topk(shape.top_k + 1).values[-2:]
        kept = (found >= last - max(slack, 0.0)) & (found > next_one - slack if slack < 0 else True)
        found = _only(found, kept, spared)
    if shape.top_p < 1:
        order = found.argsort(descending=True)
        likelier = torch.zeros_like(found)
        likelier[order[1:]] = found[order].exp().cumsum(0)[:-1]
        found = _only(found, likelier < shape.top_p + slack, spared)
    return found


def _only(logprobs_V: torch.Tensor, kept_V: torch.Tensor, spared: int | None) -> torch.Tensor:
    if spared is not None:
        kept_V[spared] = True
    return torch.log_softmax(logprobs_V.masked_fill(~kept_V, -torch.inf), dim=-1)
