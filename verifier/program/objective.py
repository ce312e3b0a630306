"""What a run trains on: rollouts in which every field differs between neighbours, and a loss that reads them all.

The loss is from no paper. It takes the reward of each rollout, the engine's log-probability of each token, the entropy
and a temperature that is not 1, so that none of them can be dropped, shifted or detached without a change of the
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verifier.data.rollout import NO_VERSION, Rollout, make_rollout
from verifier.program.spec import DRIFT_WEIGHT, ENTROPY_WEIGHT, made_up_logprobs, made_up_reward, turns

if TYPE_CHECKING:
    import torch

    from verifier.train.pack import PackedBatch


def rollouts_of(sequences: Sequence[Sequence[int]], version: int) -> list[Rollout]:
    """Token sequences as rollouts of several turns; every field differs between neighbours, so that a swap shows."""
    found = []
    for index, tokens in enumerate(sequences):
        prompt, sampled = turns(len(tokens))
        nats = made_up_logprobs(index, len(sampled))
        found.append(
            make_rollout(
                f"sequence {index}", tokens[:prompt], tokens[prompt:], group=f"prompt {index // 2}", sampled=sampled,
                logprobs=[value if drawn else math.nan for value, drawn in zip(nats, sampled, strict=True)],
                versions=[version if drawn else NO_VERSION for drawn in sampled], reward=made_up_reward(index),
            )
        )  # fmt: skip
    return found


def policy_loss(logprob_T: torch.Tensor, entropy_T: torch.Tensor, shard: PackedBatch) -> torch.Tensor:
    """-reward * logprob - ENTROPY_WEIGHT * entropy + DRIFT_WEIGHT / 2 * (logprob - engine's logprob)**2, nats.

    Rows outside of the loss mask may hold anything; what is NaN there is taken out before it meets a gradient, since
    zero times NaN is NaN.
    """
    import torch

    device = logprob_T.device
    reward_T = torch.tensor([*shard.rewards, 0.0], dtype=logprob_T.dtype)[shard.segments_T.long()].to(device)
    engine_T = torch.where(shard.loss_mask_T.cpu(), shard.engine_logprobs_T, 0).to(device)
    drift_T = logprob_T - engine_T
    return -reward_T * logprob_T - ENTROPY_WEIGHT * entropy_T + DRIFT_WEIGHT / 2 * drift_T.square()
