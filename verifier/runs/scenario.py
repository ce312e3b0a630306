"""A made-up workload: rollouts of which no two fields are alike, so that no mix-up of them goes unseen.

The loss is from no paper. It takes the reward of each rollout, the engine's log-probability of each token, the entropy
and a temperature that is not 1, so that none of them can be dropped, shifted or detached without a change of the
gradients.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from verifier.config import RoundtripConfig
from verifier.config_json import text_model
from verifier.data.recorded import RolloutRow
from verifier.model.families import num_experts_of, size_if_any
from verifier.runs.workload import ScoringPass, Workload
from verifier.stages.loss.records import Objective
from verifier.stages.train.records import OptimizerRule

Tokens = Sequence[Sequence[int]]
"""Token ids of each sequence."""
NUM_SEQUENCES = 8
LENGTHS = (16, 48)
SHORTER, BLOCK = 10, 32
"""Tokens by which a batch's longest sequence may be below what was asked for; tokens of a cache's block on a CPU."""
WHOLE_PROMPT = 156
"""Four tokens less than a number of such blocks, so that a sample of four ends with one."""
SHORT_PROMPT = 126
"""Two tokens less than a number of them, so that a sample of four begins the next block while it is decoded."""
SHARED = slice(32, 64)
"""Tokens that two prompts have in common, after different ones."""
LONG = 1000
"""Tokens of a sequence that the trainer alone scores: what is off by a little at each position adds up."""
LONG_LOGITS = 1 << 27
"""Most logits of that sequence: an oracle holds all of them in float64."""
MICRO_BATCH = 3
"""Rollouts of a micro-batch: so few that every rank adds up the gradients of several, of which one gets fewer."""
OBJECTIVE = Objective(name="policy loss", temperature=1.25, entropy_weight=0.1, drift_weight=0.05, every_second=2**-6)
"""A temperature above 1, so that rounding is not magnified. Every second step's gradient is shorter than what clips,
by a power of 2, which rounds nothing."""
RULE = OptimizerRule(
    name="Adam", first_learning_rate=7e-4, learning_rate=1.3e-3, least_learning_rate=5e-4,
    embedding_learning_rate=1e-3, least_embedding_learning_rate=4e-4, warm_up=NUM_SEQUENCES * 3 // 2,
    num_rollouts=NUM_SEQUENCES * 4, weight_decay=1.0, greatest_weight_decay=5.0, clip_grad=0.75,
)  # fmt: skip
"""Two steps of as many rollouts warm up, and from the third on rates fall; each has its own, so that a count that is
off shows. Every matrix decays: a vector that does and a matrix that does not show, and so does a percent of it."""
ADAPTER_RULE = replace(RULE, weight_decay=0.0, greatest_weight_decay=0.0)
TRUNCATED, UNANSWERED, BRIEF, CURT = 4, 5, 6, 7
"""Exceptions among eight rollouts: one whose answer was cut off, so that none of it is trained
on; one without an answer; one whose answer is of one token; one whose prompt is."""
OUTLIER_NATS = -24.0
"""Nats added to the made-up report of the engine for one token in eleven: a clamp of the ratio shows."""


def made_up(config: RoundtripConfig, sizes: Mapping[str, Any]) -> Workload:
    """Draw the tokens of all batches by the run's seed, and make up everything else.

    The first batch alone has a long sequence. Every version scores one.
    """
    vocabulary = int(text_model(sizes)["vocab_size"])
    draw = random.Random(config.seed)  # noqa: S311 - test tokens
    scored = _with_a_long_one(draw, max(NUM_SEQUENCES, 2 * config.mesh.dp), vocabulary, config.length)
    prompts = _prompts(draw, vocabulary, config.length)
    num_trained = max(NUM_SEQUENCES, (MICRO_BATCH + 1) * config.mesh.dp)
    # Gradients cost the most of a round trip.
    batches = [_with_a_long_one(draw, num_trained, vocabulary, config.length)]
    batches += [_sequences(draw, num_trained, LENGTHS, vocabulary) for _ in range(1, config.cycles)]
    long = long_one(config.seed, sizes, config.length)
    return workload(scored, batches, prompts, long, adapter=config.engine.lora_rank > 0)


def workload(
    scored: Tokens, batches: Sequence[Tokens], prompts: Tokens, long: Sequence[int] = (), *, adapter: bool = False
) -> Workload:
    """Make up everything but the token ids; `long` is scored by the trainer alone, and an `adapter` does not decay."""
    rows, rule = rollout_rows(scored), ADAPTER_RULE if adapter else RULE
    of_a_step = {key: getattr(rule, key) * len(batches[0]) // NUM_SEQUENCES for key in ("warm_up", "num_rollouts")}
    passes = [
        ScoringPass(name="scored", rollouts=rows),
        ScoringPass(name="scored at a temperature", rollouts=rows, temperature=OBJECTIVE.temperature),
    ]
    if long:  # packed with a short one: who loses one sequence of a batch shall not be left with none
        passes.append(ScoringPass(name="scored at length", rollouts=rollout_rows([long, scored[0]])))
    return Workload(
        passes=tuple(passes), prompts=tuple(tuple(prompt) for prompt in prompts), micro_batch_size=MICRO_BATCH,
        batches=tuple(rollout_rows(batch, version) for version, batch in enumerate(batches)),
        objective=OBJECTIVE, rule=replace(rule, **of_a_step),
    )  # fmt: skip


def rollout_rows(sequences: Tokens, version: int = 0) -> tuple[RolloutRow, ...]:
    """Token sequences as rollouts of several turns; every field differs between neighbours, so that a swap shows.

    A quarter of a sequence is prompt, but for the exceptional ones; of the response every fifth token is tool output,
    so that masks have holes as real ones do. Every seventh token is left out of the loss as well, so that a mask that
    is not taken, or made anew of who wrote what, shows. Rewards are of either sign and once zero, and of more bits than
    bf16 has. The first tokens are by the weights of `version`, later ones by later weights.
    """
    found = []
    for index, tokens in enumerate(sequences):
        kind, length = index % 8, len(tokens)
        prompt = {UNANSWERED: length, BRIEF: length - 1, CURT: 1}.get(kind, max(1, length // 4))
        answer = range(length - prompt)
        sampled = tuple(at % 5 != 4 for at in answer)
        found.append(
            RolloutRow(
                id=f"sequence {index}", group=f"prompt {index // 2}", prompt=tuple(tokens[:prompt]),
                response=tuple(tokens[prompt:]), sampled=sampled,
                mask=tuple(drawn and at % 7 != 3 and kind != TRUNCATED for at, drawn in enumerate(sampled)),
                logprobs=tuple(-(index + 1) - at / 100 + OUTLIER_NATS * (at % 11 == 10) for at in answer),
                versions=tuple(version + (index + at // 6) % 3 for at in answer),
                reward=(index + 1) / 3 * (1, -1, 1, 0, 1, -1, 1, -1)[kind],
            )
        )  # fmt: skip
    return tuple(found)


def long_one(seed: int, sizes: Mapping[str, Any], longest: int = 0) -> list[int]:
    """One sequence for the trainer alone; none for experts, where in a thousand tokens some router has a tie."""
    if num_experts_of(sizes):
        return []
    vocabulary = int(text_model(sizes)["vocab_size"])
    length = max(LONG, longest)
    room = min(length, size_if_any(sizes, "max_position_embeddings") or length, LONG_LOGITS // vocabulary)
    return _sequences(random.Random(f"{seed} long"), 1, (room, room), vocabulary)[0]  # noqa: S311 - test tokens


def _prompts(draw: random.Random, vocabulary: int, longest: int) -> list[list[int]]:
    """Prompts that a prefix cache may take for each other.

    The first has one token more than several blocks, so that each of hundreds of draws after it computes one token. The
    second has one of its blocks in common with the first, and the third is how the second begins.
    """
    lengths = (longest - SHORTER - 2) // BLOCK * BLOCK + 1, WHOLE_PROMPT
    first, second = (_sequences(draw, 1, (length,) * 2, vocabulary)[0] for length in lengths)
    second[SHARED] = first[SHARED]
    return [first, second, second[:SHORT_PROMPT]]


def _sequences(draw: random.Random, count: int, lengths: tuple[int, int], vocabulary: int) -> list[list[int]]:
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(*lengths))] for _ in range(count)]


def _with_a_long_one(draw: random.Random, count: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Sequences of which one is longer than whatever repeats, or is cut, every 64, 128 or 256 positions."""
    long = _sequences(draw, 1, (longest - SHORTER, longest), vocabulary)
    return long + _sequences(draw, count - 1, LENGTHS, vocabulary)
