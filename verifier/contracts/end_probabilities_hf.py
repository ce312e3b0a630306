"""Contract of transformers' log-probabilities: an end token at a place is as likely as a sequence that ends there."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from verifier.model.tiny import write_tiny
from verifier.oracle.logprob_hf import score, sides

TOKENS, ENDS, TEMPERATURE = [(7 * at) % 61 for at in range(6)], (3, 17), 0.7


def ends_are_those_of_sequences_that_end() -> None:
    """In a dense model and in a mixture."""
    for family in ("qwen3", "qwen3-moe"):
        with tempfile.TemporaryDirectory(prefix="verifier-contract-") as folder:
            path = str(write_tiny(family, Path(folder)))
            _, ((found,), *_), _ = sides(None, path, [TOKENS], "float64", temperature=TEMPERATURE, ends=ENDS)
            assert len(found) == len(TOKENS) - 1
            for at, probability in enumerate(found, 1):
                ended = score(None, path, [[*TOKENS[:at], end] for end in ENDS], "float32", temperature=TEMPERATURE)
                expected = sum(math.exp(row[-1]) for row in ended)
                assert abs(probability / expected - 1) < 1e-4, (family, at, probability, expected)
