"""What requests ask of the next token's distribution, and what it then is: penalties, biases, truncation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from verifier.engine.engine import Sampling


def shaped(
    logits_V: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, slack: float = 0.0
) -> torch.Tensor:
    """[V] log-probabilities of the next token as a request asks for them; at temperature 0 as at 1.

    Args:
        logits_V: of the model.
        prompt: tokens before the first that was sampled.
        answer: tokens that were sampled since.
        sampling: what the request asks for.
        slack: by how much truncation keeps more than it should, nats and shares; below 0: less. What rounding may do.

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
        found[list(sampling.stop)] = -torch.inf
    for token, nats in shape.bias:
        found[token] += nats
    for token in {*prompt, *answer}:
        found[token] *= 1 / shape.repetition if found[token] > 0 else shape.repetition
    for token, count in Counter(answer).items():
        found[token] -= shape.frequency * count + shape.presence
    found = torch.log_softmax(found / (sampling.temperature or 1.0), dim=-1)
    if shape.min_p:
        found = _only(found, found.exp() >= shape.min_p * found.max().exp() * (1 - slack))
    if 0 < shape.top_k < len(found):
        last, next_one = found.topk(shape.top_k + 1).values[-2:]
        found = _only(found, (found >= last - max(slack, 0.0)) & (found > next_one - slack if slack < 0 else True))
    if shape.top_p < 1:
        order = found.argsort(descending=True)
        likelier = torch.zeros_like(found)
        likelier[order[1:]] = found[order].exp().cumsum(0)[:-1]
        found = _only(found, likelier < shape.top_p + slack)
    return found


def _only(logprobs_V: torch.Tensor, kept_V: torch.Tensor) -> torch.Tensor:
    """The distribution without the others."""
    return torch.log_softmax(logprobs_V.masked_fill(~kept_V, -torch.inf), dim=-1)
