"""Scenario of a run: made-up rollouts to score, sample and train on, no two with a field in common, and a loss.

The loss is from no paper. It takes the reward of each rollout, the engine's log-probability of each token, the entropy
and a temperature that is not 1, so that none of them can be dropped, shifted or detached without a change of the
gradients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifier.config import RoundtripConfig
from verifier.data.rollout import NO_VERSION, Role, Rollout, make_rollout
from verifier.model.families import num_experts_of, size_if_any

if TYPE_CHECKING:
    import torch

    from verifier.train.pack import PackedBatch

NUM_SEQUENCES = 8
LENGTHS = (16, 48)
PROMPT_LENGTHS = (140, 150)
"""Tokens of a prompt: several blocks of the prefix cache (32 tokens on the CPU, 16 on a GPU)."""
WHOLE_PROMPT = 156
"""Four tokens less than a number of such blocks, so that a sample of four ends with one."""
SHORT_PROMPT = 126
"""Two tokens less than a number of them, so that a sample of four begins the next block while it is decoded."""
SHARED = slice(32, 64)
"""Tokens that two prompts have in common, after different ones."""
LONG = 1000
"""Tokens of a sequence that the trainer alone scores: what is off by a little at each position adds up."""
LONG_LOGITS = 1 << 27
"""Logits that it may have: an oracle holds all of them in float64."""
LEARNING_RATE = 1e-3
"""Learning rate of the first training step."""
CLIP_GRAD = 1.0
"""Greatest L2 norm of the gradient of a step."""
RATES: dict[str, float] = {
    "learning_rate": LEARNING_RATE,
    "least_learning_rate": LEARNING_RATE / 2,
    "weight_decay": 0.1,
    "greatest_weight_decay": 0.2,
    "num_steps": 4,
}
"""Rates of the steps: each step has its own, so that a scheduler that misses a step or takes two shows. Every matrix
decays, so that a vector that decays and a matrix that does not show."""
NO_DECAY = {"weight_decay": 0.0, "greatest_weight_decay": 0.0}
"""Instead, of an adapter."""
AT_TEMPERATURE = "scored at a temperature"
"""Name of the pass that scores at `TEMPERATURE`."""
AT_LENGTH = "scored at length"
"""Name of the pass that scores one long sequence."""
TEMPERATURE = 1.25
"""Divisor of the logits in a training step, and in one more pass that scores. Not 1, so that one forgotten shows; above
1, so that rounding is not magnified."""
ENTROPY_WEIGHT = 0.1
"""Weight of each token's entropy in the loss."""
DRIFT_WEIGHT = 0.05
"""Weight of half the squared distance between a token's log-probability and the engine's in the loss."""
MICRO_BATCH = 3
"""Sequences that are trained on together at the most, so few that every rank adds up the gradients of several
micro-batches, and that one of them gets fewer."""
TRUNCATED, UNANSWERED, BRIEF, CURT = 4, 5, 6, 7
"""Sequences, of eight, that are not like the others: one whose answer was cut off, so that none of it is trained
on; one without an answer; one whose answer is of one token; one whose prompt is."""
OUTLIER_NATS = -24.0
"""Nats that the engine is said to have reported less for one token in eleven: a clamp of the ratio shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Tokens of a round trip."""

    sequences: Sequence[Sequence[int]] = ()
    """Token ids that trainer, engine and oracle score."""
    long: Sequence[int] = ()
    """Token ids that trainer and oracle score at version 0, more than an engine has room for."""
    prompts: Sequence[Sequence[int]] = ()
    """Prompts to sample from, longer than a block of the prefix cache."""
    batches: Sequence[Sequence[Sequence[int]]] = ()
    """Token ids of each training step, one batch per cycle."""

    @property
    def at_length(self) -> list[Sequence[int]]:
        """The long sequence, and a short one packed with it: who loses one of a batch's shall not be left with none."""
        return [self.long, self.sequences[0]]


def made_up(config: RoundtripConfig, sizes: Mapping[str, Any]) -> Scenario:
    """Draw the tokens of all batches.

    Args:
        config: of the run; its seed decides.
        sizes: the model's config.json.
    """
    vocabulary = int(sizes["vocab_size"])
    draw = random.Random(config.seed)  # noqa: S311 - test tokens
    scored = _with_a_long_one(draw, max(NUM_SEQUENCES, 2 * config.mesh.dp), vocabulary)
    prompts = _prompts(draw, vocabulary)
    num_trained = max(NUM_SEQUENCES, (MICRO_BATCH + 1) * config.mesh.dp)
    return Scenario(
        sequences=scored, long=long_one(config.seed, sizes), prompts=prompts,
        batches=[_with_a_long_one(draw, num_trained, vocabulary) for _ in range(config.cycles)],
    )  # fmt: skip


def long_one(seed: int, sizes: Mapping[str, Any]) -> list[int]:
    """One sequence for the trainer alone; none for experts, where in a thousand tokens some router has a tie."""
    if num_experts_of(sizes):
        return []
    vocabulary = int(sizes["vocab_size"])
    room = min(LONG, size_if_any(sizes, "max_position_embeddings") or LONG, LONG_LOGITS // vocabulary)
    return _sequences(random.Random(f"{seed} long"), 1, (room, room), vocabulary)[0]  # noqa: S311 - test tokens


def _prompts(draw: random.Random, vocabulary: int) -> list[list[int]]:
    """Prompts that a prefix cache may take for each other.

    The second has one of its blocks in common with the first, and the third is how the second begins.
    """
    first, second = (_sequences(draw, 1, lengths, vocabulary)[0] for lengths in (PROMPT_LENGTHS, (WHOLE_PROMPT,) * 2))
    second[SHARED] = first[SHARED]
    return [first, second, second[:SHORT_PROMPT]]


def _sequences(draw: random.Random, count: int, lengths: tuple[int, int], vocabulary: int) -> list[list[int]]:
    """Random token sequences of random length (inclusive bounds)."""
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(*lengths))] for _ in range(count)]


def _with_a_long_one(draw: random.Random, count: int, vocabulary: int) -> list[list[int]]:
    """Sequences of which one is longer than whatever repeats, or is cut, every 64 or 128 positions."""
    return [
        *_sequences(draw, 1, PROMPT_LENGTHS, vocabulary),
        *_sequences(draw, count - 1, LENGTHS, vocabulary),
    ]


def turns(index: int, num_tokens: int) -> tuple[int, list[bool]]:
    """Parts of a training sequence: length of its prompt, and for each later token whether it was sampled.

    A quarter is prompt, but for the sequences named above; of the response every fifth token is tool output, so that
    masks have holes as real ones do.
    """
    quarter = max(1, num_tokens // 4)
    prompt = {UNANSWERED: num_tokens, BRIEF: num_tokens - 1, CURT: 1}.get(index % 8, quarter)
    return prompt, [at % 5 != 4 for at in range(num_tokens - prompt)]


def trained(index: int, num_tokens: int) -> list[bool]:
    """For each token after the prompt whether it is in the loss: sampled, and not left out.

    Every seventh token is left out as well, so that a mask that is not taken, or made anew of who wrote what, shows.
    """
    _, sampled = turns(index, num_tokens)
    return [drawn and at % 7 != 3 and index % 8 != TRUNCATED for at, drawn in enumerate(sampled)]


def made_up_reward(index: int) -> float:
    """Reward of a training sequence: another one for each, of either sign and once zero, and of more bits than bf16."""
    return (index + 1) / 3 * (1, -1, 1, 0, 1, -1, 1, -1)[index % 8]


def made_up_logprobs(index: int, num_tokens: int) -> list[float]:
    """Made-up report of the engine on a training sequence's response, nats: another one for each token."""
    return [-(index + 1) - at / 100 + OUTLIER_NATS * (at % 11 == 10) for at in range(num_tokens)]


def made_up_versions(index: int, num_tokens: int, version: int) -> list[int]:
    """The weights that are said to have sampled each token of a response: it went on while they changed."""
    return [version + (index + at // 6) % 3 for at in range(num_tokens)]


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


def expected_rollouts(sequences: Sequence[Sequence[int]], version: int) -> list[Rollout]:
    """Expected result of `rollouts_of`, put together token by token by other code, for the ledger."""
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
