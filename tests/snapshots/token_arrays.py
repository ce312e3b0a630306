"""Arrays of two packed rollouts, of 3 and 2 tokens."""

import numpy as np

TOKENS = {
    "tokens": np.array([1, 2, 3, 7, 5]),
    "sampled": np.array([False, True, True, False, True]),
    "mask": np.array([False, True, True, False, True]),
    "roles": np.array([0, 1, 1, 0, 1], np.int8),
    "logprobs": np.array([np.nan, -1.5, -2.25, np.nan, -6.0], np.float32),
    "versions": np.array([-1, 0, 0, -1, 0], np.int32),
}
"""Two rollouts, of 3 and 2 tokens."""
LEDGER = {
    "sentinel": np.array([(1 << 32) + 1, (1 << 32) + 2, 0, 0, (2 << 32) + 1, 0]),
    "input": np.array([1, 2, 3, 0, 7, 5]),
    "position": np.array([0, 1, 2, 3, 0, 1]),
    "role": np.array([0, 1, 1, 0, 0, 1], np.int8),
    "label": np.array([2, 3, -100, -100, 5, -100]),
    "mask": np.array([True, True, False, False, True, False]),
    "sampled": np.array([True, True, False, False, True, False]),
    "engine_logprob": np.array([-1.5, -2.25, np.nan, np.nan, -6.0, np.nan], np.float32),
    "version": np.array([0, 0, -1, -1, 0, -1], np.int32),
    "reward": np.array([0.5, 0.5, 0.5, np.nan, -1.0, -1.0]),
    "group": np.array([2363233923, 2363233923, 2363233923, 0, 4225443349, 4225443349]),
    "id": np.array([703434788, 703434788, 703434788, 0, 1592434866, 1592434866]),
    "prompt": np.array([1, 1, 1, 0, 1, 1]),
}
"""Rows of one micro-batch: three of the first rollout, one of padding, two of the second."""
DRAWN = tuple(int(digit) for digit in "001200102120010021010200020112001201002000120021010200102001")
NEXT = np.log([0.5, 0.25, 0.25])
PLACES = (("kept", 7, 8), ("rest", 7, 0.5), ("earlier", 4, np.nan), ("repeats", 4, False))
SCORES: dict[str, dict[str, np.ndarray]] = {
    "right": {"array": np.array([-1.5, -2.25, -0.5, -6.0, -6.25], np.float32)},
    "close": {"array": np.array([-1.5, -2.25, -0.5, -6.0, -6.250001], np.float32)},
    "wrong": {"array": np.array([-1.5, -2.25, -0.5, -6.0, -6.75], np.float32)},
    "not finite": {"array": np.array([-1.5, np.nan, -0.5, -6.0, -6.25], np.float32)},
    "shares": {"array": NEXT},
    "drawn": {"array": NEXT[list(DRAWN)].astype(np.float32)},
    "places": {"rank": np.array([0, 3, 1, 40, 2]), **{name: np.full((5, n), v) for name, n, v in PLACES}},
}
"""Log-probabilities of these tokens, and draws with their distributions."""
