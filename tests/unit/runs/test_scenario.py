"""What a run trains on: made one way and stated another, and in nothing so uniform that a mix-up would not show."""

import dataclasses

import numpy as np
import pytest

from verifier.data.rollout import Rollout
from verifier.oracle.oracle import _sample
from verifier.runs.scenario import expected_rollouts, rollouts_of

LENGTHS = (145, 16, 48, 33, 17, 20, 31, 40, 16)
SEQUENCES = [list(range(100 * at, 100 * at + length)) for at, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("version", [0, 2])
def test_rollouts_are_what_is_stated(version: int) -> None:
    for made, said in zip(rollouts_of(SEQUENCES, version), expected_rollouts(SEQUENCES, version), strict=True):
        for field in dataclasses.fields(Rollout):
            left, right = getattr(made, field.name), getattr(said, field.name)
            np.testing.assert_array_equal(left, right, err_msg=field.name)
            assert getattr(left, "dtype", None) == getattr(right, "dtype", None), field.name


def test_the_oracle_of_a_step_reads_the_same() -> None:
    for index, (rollout, tokens) in enumerate(zip(rollouts_of(SEQUENCES, 0), SEQUENCES, strict=True)):
        ids, mask, reward, nats = _sample(index, tokens)
        assert (ids, mask, reward) == (rollout.tokens.tolist(), rollout.mask.tolist(), rollout.reward)
        np.testing.assert_array_equal(np.float32(nats)[rollout.mask], rollout.logprobs[rollout.mask])


def test_no_field_is_like_another_or_the_same_everywhere() -> None:
    batch = rollouts_of(SEQUENCES, 1)
    assert all((rollout.mask != rollout.sampled).any() for rollout in batch if rollout.response_length > 3)
    assert [rollout.response_length for rollout in batch[5:8]] == [0, 1, 39]
    assert not batch[4].mask.any()
    assert batch[4].sampled.any()
    assert {np.sign(rollout.reward) for rollout in batch} == {-1, 0, 1}
    assert any(np.float32(rollout.reward).view(np.uint32) & 0xFFFF for rollout in batch)
    assert len(set(batch[0].versions.tolist())) == 4
