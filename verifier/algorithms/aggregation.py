"""Weights of tokens, such that the sum of weight times loss over all ranks is the aggregated loss of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from verifier.errors import ContractError, UsageError

AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")


def token_weights(
    masks: Sequence[np.ndarray], prompts: Sequence[str], how: str, constant: float | None = None
) -> list[np.ndarray]:
    """Compute the weight of each token of the batch of one optimiser step.

    With n tokens of a sequence in the loss, out of S sequences of which E have any, and P prompts that have any:

    | how | weight of a token in the loss | the loss is |
    | --- | --- | --- |
    | token_mean | 1 / (tokens of the batch) | the mean over all tokens |
    | sequence_mean | 1 / (E n) | the mean over sequences of their mean over tokens |
    | prompt_mean | 1 / (P (tokens of the prompt)) | the mean over prompts of their mean over tokens |
    | constant | 1 / (S constant) | the sum over tokens, by a number that no sample changes |

    A sequence or prompt without tokens in the loss has no mean, so it does not count; with `constant` it counts.

    Args:
        masks: [L] bool per sequence, True for tokens in the loss.
        prompts: name of each sequence's prompt.
        how: one of `AGGREGATIONS`.
        constant: tokens that a sequence is divided by, such as the greatest length of an answer; for `constant` only.

    Returns:
        [L] float64 per sequence, 0 outside of the mask.

    Raises:
        UsageError: `how` is unknown, `constant` is missing, not positive or not used, or no token is in the loss.

    Source:
        token_mean: DAPO (arXiv 2503.14476), equation 8. sequence_mean: GRPO (arXiv 2402.03300), equation 3.
        prompt_mean: ScaleRL (arXiv 2510.13786), prompt average. constant: Dr. GRPO (arXiv 2503.20783), its
        `MAX_TOKENS`; SkyRL `seq_mean_token_sum_norm`.
    """
    if how not in AGGREGATIONS:
        raise UsageError(f"aggregation `{how}` is unknown (known: {', '.join(AGGREGATIONS)})")
    if how == "constant" and not (constant is not None and 0 < constant < math.inf):
        raise UsageError(f"aggregation `constant` needs a positive number of tokens, its constant is {constant}")
    if how != "constant" and constant is not None:
        raise UsageError(f"aggregation `{how}` does not use the constant {constant:g}: leave it out, or use `constant`")
    if len(masks) != len(prompts):
        raise ContractError(f"there are {len(masks)} masks and {len(prompts)} prompts")
    counts = [int(np.asarray(mask, bool).sum()) for mask in masks]
    of_prompts: Counter[str] = Counter()
    for prompt, count in zip(prompts, counts, strict=True):
        of_prompts[prompt] += count
    total, num_sequences = sum(counts), sum(count > 0 for count in counts)
    num_prompts = sum(count > 0 for count in of_prompts.values())
    if not total:
        raise UsageError("no token of any rollout is in the loss mask: there is nothing to train on")

    def weight(prompt: str, count: int) -> float:
        if how == "token_mean":
            return 1 / total
        if how == "sequence_mean":
            return 1 / (num_sequences * count)
        if how == "prompt_mean":
            return 1 / (num_prompts * of_prompts[prompt])
        return 1 / (len(masks) * float(constant or 0))

    return [
        np.where(np.asarray(mask, bool), weight(prompt, count) if count else 0.0, 0.0)
        for mask, prompt, count in zip(masks, prompts, counts, strict=True)
    ]
