"""Noise of bf16 in a model's log-probabilities, measured on random tokens and stored as a tolerance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from verifier.errors import UsageError
from verifier.model.checkpoint import Checkpoint
from verifier.model.families import size_if_any
from verifier.oracle import noise_floor as floors

DTYPE = "bfloat16"
TOKENS = 8_192
"""Log-probabilities per bucket: the greatest of so many is not exceeded by a run of hundreds, or hardly."""
SHORTEST = 8
Progress = Callable[[str], None]
Score = Callable[[Path, Sequence[Sequence[int]], str], list[list[float]]]
"""(checkpoint, sequences, dtype) -> per sequence its log-probabilities, nats."""


def measure(
    model: str, checkpoint: Checkpoint, tier: str, score: Score, progress: Progress, *, why: str, tokens: int = TOKENS
) -> floors.Floor:
    """The floor of a checkpoint in bf16, from random tokens, by transformers on the tier's own device.

    Every bucket has at least `tokens` log-probabilities; `why` is kept with the floor.

    Raises:
        UsageError: the model takes no sequence as long as the shortest bucket's.
    """
    sizes = {key: size_if_any(checkpoint.config, key) for key in ("vocab_size", "max_position_embeddings")}
    vocabulary, room = sizes["vocab_size"], sizes["max_position_embeddings"]
    if vocabulary is None or room is None:
        raise UsageError(f"config.json of {checkpoint.path} lacks `vocab_size` or `max_position_embeddings`")
    edges = [edge for edge in floors.EDGES if edge <= room]
    if not edges:
        raise UsageError(f"the model takes {room} tokens at the most, the shortest bucket has {floors.EDGES[0]}")
    buckets: list[floors.Bucket] = []
    for shortest, longest in zip((SHORTEST, *(edge + 1 for edge in edges)), edges, strict=False):
        progress(f"sequences of {shortest} to {longest} tokens")
        sequences = drawn(shortest, longest, vocabulary, tokens)
        rounded, exact = (score(checkpoint.path, sequences, dtype) for dtype in (DTYPE, "float32"))
        buckets.append(floors.bucket_of(longest, rounded, exact))
    return floors.Floor(
        model=floors.label_of(model), dtype=DTYPE, tier=tier, versions=floors.versions(), buckets=tuple(buckets),
        config=floors.config_digest(checkpoint.config), weights=floors.weights_digest(checkpoint), why=why,
        command=f"verifier noise --model {floors.label_of(model)} --record",
    )  # fmt: skip


def drawn(shortest: int, longest: int, vocabulary: int, tokens: int) -> list[list[int]]:
    """Random sequences of random lengths (inclusive bounds) that have so many log-probabilities at least."""
    draw = random.Random(f"{shortest} to {longest}")  # noqa: S311 - test tokens
    found: list[list[int]] = []
    while sum(len(tokens) - 1 for tokens in found) < tokens:
        found.append([draw.randrange(vocabulary) for _ in range(draw.randint(shortest, longest))])
    return found


def table(floor: floors.Floor) -> str:
    """Text of a noise floor, a line per bucket; nats."""
    lines = [f"noise of {floor.model} in {floor.dtype} on the {floor.tier} tier, nats"]
    lines.append(f"{'tokens':>12} {'measured':>9} {'median':>8} {'mean':>8} {'p90':>8} {'p99':>8} {'max':>8}")
    shortest = SHORTEST
    for item in floor.buckets:
        values = " ".join(f"{value:8.4f}" for value in (item.median, item.mean, item.p90, item.p99, item.max))
        lines.append(f"{f'{shortest} to {item.longest}':>12} {item.tokens:>9,} {values}")
        shortest = item.longest + 1
    return "\n".join(lines) + "\n"
