"""What a run trains on: made one way and expected another, and in nothing so uniform that a mix-up would not show."""

import dataclasses

import numpy as np
import pytest

from verifier.data.rollout import Rollout
from verifier.runs.scenario import LONG, LONG_LOGITS, long_one, rollout_rows
from verifier.runs.workload import expected_rollouts, rollouts_of

LENGTHS = (145, 16, 48, 33, 17, 20, 31, 40, 16)
SEQUENCES = [list(range(100 * at, 100 * at + length)) for at, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("version", [0, 2])
def test_rollouts_are_what_is_expected(version: int) -> None:
    rows = rollout_rows(SEQUENCES, version)
    for made, expected in zip(rollouts_of(rows), expected_rollouts(rows), strict=True):
        for field in dataclasses.fields(Rollout):
            left, right = getattr(made, field.name), getattr(expected, field.name)
            np.testing.assert_array_equal(left, right, err_msg=field.name)
            assert getattr(left, "dtype", None) == getattr(right, "dtype", None), field.name


def test_no_field_is_like_another_or_the_same_everywhere() -> None:
    batch = rollouts_of(rollout_rows(SEQUENCES, 1))
    assert all((rollout.mask != rollout.sampled).any() for rollout in batch if rollout.response_length > 3)
    assert [rollout.response_length for rollout in batch[5:8]] == [0, 1, 39]
    assert not batch[4].mask.any()
    assert batch[4].sampled.any()
    assert {np.sign(rollout.reward) for rollout in batch} == {-1, 0, 1}
    assert any(np.float32(rollout.reward).view(np.uint32) & 0xFFFF for rollout in batch)
    assert len(set(batch[0].versions.tolist())) == 4


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
def test_the_long_sequence_is_as_long_as_there_is_room_for(sizes: dict[str, int], length: int) -> None:
    assert len(tokens(**sizes)) == length


def test_the_tokens_of_the_long_sequence_are_of_the_vocabulary_and_of_the_seed() -> None:
    assert set(tokens()) <= set(range(512))
    assert tokens() == tokens()
    assert tokens() != tokens(seed=2)
