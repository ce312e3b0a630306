"""What a run trains on: rollouts in which every field differs between neighbours, and a loss that reads them all.

The loss is from no paper. It takes the reward of each rollout, the engine's log-probability of each token, the entropy
and a temperature that is not 1, so that none of them can be dropped, shifted or detached without a change of the
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verifier.data.rollout import NO_VERSION, Role, Rollout, make_rollout
from verifier.runs.spec import (
    DRIFT_WEIGHT,
    ENTROPY_WEIGHT,
    made_up_logprobs,
    made_up_reward,
    made_up_versions,
    trained,
    turns,
)

if TYPE_CHECKING:
    import torch

    from verifier.train.pack import PackedBatch


def rollouts_of(sequences: Sequence[Sequence[int]], version: int) -> list[Rollout]:
    """Token sequences as rollouts of several turns; every field differs between neighbours, so that a swap shows."""
    found = []
    for index, tokens in enumerate(sequences):
        prompt, sampled = turns(index, len(tokens))
        versions = made_up_versions(index, len(sampled), version)
        found.append(
            make_rollout(
                f"sequence {index}", tokens[:prompt], tokens[prompt:], group=f"prompt {index // 2}", sampled=sampled,
                mask=trained(index, len(tokens)), logprobs=made_up_logprobs(index, len(sampled)), versions=versions,
                reward=made_up_reward(index),
            )
        )  # fmt: skip
    return found


def stated(sequences: Sequence[Sequence[int]], version: int) -> list[Rollout]:
    """What `rollouts_of` has to give, put together token by token and by none of its code: what a ledger goes by."""
    import numpy as np

    found = []
    for index, tokens in enumerate(sequences):
        prompt, sampled = turns(index, len(tokens))
        given = [(Role.PROMPT, False, False, math.nan, NO_VERSION)] * prompt
        answered = [
            (Role.ASSISTANT, True, kept, nats, weights) if drawn else (Role.TOOL, False, False, math.nan, NO_VERSION)
            for drawn, kept, nats, weights in zip(
                sampled, trained(index, len(tokens)), made_up_logprobs(index, len(sampled)),
                made_up_versions(index, len(sampled), version), strict=True,
            )
        ]  # fmt: skip
        roles, drawn, kept, nats, weights = zip(*given, *answered, strict=True)
        found.append(
            Rollout(
                id=f"sequence {index}", group=f"prompt {index // 2}", tokens=np.array(tokens, np.int64),
                prompt_length=prompt, sampled=np.array(drawn, np.bool_), mask=np.array(kept, np.bool_),
                roles=np.array(roles, np.int8), logprobs=np.array(nats, np.float32),
                versions=np.array(weights, np.int32), reward=made_up_reward(index),
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
