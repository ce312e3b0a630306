"""Log-probabilities that ranks write for the oracle: each at the place of its token, and none where no rank has one."""

from __future__ import annotations

import numpy as np
import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.megatron.pack import POSITION_BITS
from verifier.stages.logprob.probe_oracle_scores import load_scores, save_scores, tells_scores

LENGTHS = [3, 4]


def rows(*places: tuple[int, int, bool, float]) -> dict[str, np.ndarray]:
    """Rows of a rank, of (rollout, position, in the loss, log-probability)."""
    rollout, position, mask, nats = zip(*places, strict=True)
    return {
        "sentinel": ((np.array(rollout, np.int64) + 1) << POSITION_BITS) + np.array(position),
        "mask": np.array(mask), "current": np.array(nats, np.float32),
    }  # fmt: skip


def test_scores_of_all_ranks_stand_at_their_tokens(tmp_path):
    assert load_scores(tmp_path, 1, LENGTHS) is None
    save_scores(tmp_path, 1, "dp=0 cp=0", rows((1, 3, True, -1.5), (0, 1, True, -0.5), (0, 2, False, -9.0)))
    save_scores(tmp_path, 1, "dp=0 cp=1", rows((1, 2, True, -2.5)))
    found = load_scores(tmp_path, 1, LENGTHS)
    np.testing.assert_array_equal(found, np.array([np.nan, -0.5, np.nan, np.nan, np.nan, -2.5, -1.5], np.float32))
    assert load_scores(tmp_path, 2, LENGTHS) is None


@pytest.mark.parametrize(
    ("words", "told"), [(("algorithm=grpo", "dtype=bf16"), True), (("algorithm=grpo",), False), (("dtype=bf16",), True)]
)  # fmt: skip
def test_only_runs_below_float32_tell_scores(words, told):
    assert tells_scores(load(TrainConfig, overrides=("model=tiny:add", *words))[0]) is told
