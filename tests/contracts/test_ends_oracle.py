"""transformers' probability of an end token at each place is that of a sequence that ends there."""

from __future__ import annotations

import math

import pytest

from verifier.model.tiny import write_tiny
from verifier.oracle.logprob_hf import end_probabilities, score

TOKENS, ENDS, TEMPERATURE = [(7 * at) % 61 for at in range(6)], (3, 17), 0.7


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_ends_are_those_of_sequences_that_end(tmp_path, family) -> None:
    path = str(write_tiny(family, tmp_path))
    (found,) = end_probabilities(None, path, [TOKENS], ENDS, "float32", TEMPERATURE)
    assert len(found) == len(TOKENS) - 1
    for at, probability in enumerate(found, 1):
        ended = score(None, path, [[*TOKENS[:at], end] for end in ENDS], "float32", temperature=TEMPERATURE)
        assert probability == pytest.approx(sum(math.exp(row[-1]) for row in ended), rel=1e-4)
