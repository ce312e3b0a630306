"""The sequence that only the trainer scores: as long as model and oracle have room for, and none for experts."""

from __future__ import annotations

import pytest

from verifier.runs.scenario import LONG, LONG_LOGITS, long_one


def tokens(seed: int = 1, **sizes: int) -> list[int]:
    return long_one(seed, {"vocab_size": 512, **sizes})


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ({}, LONG),
        ({"max_position_embeddings": 4 * LONG}, LONG),
        ({"max_position_embeddings": 300}, 300),
        ({"vocab_size": 1 << 20}, LONG_LOGITS >> 20),
        ({"num_experts": 16}, 0),
    ],
)
def test_its_length_is_what_there_is_room_for(sizes: dict[str, int], length: int) -> None:
    assert len(tokens(**sizes)) == length


def test_its_tokens_are_of_the_vocabulary_and_of_the_seed() -> None:
    assert set(tokens()) <= set(range(512))
    assert tokens() == tokens()
    assert tokens() != tokens(seed=2)
