"""The content digest's lane sums in numpy: the reference that kernels on host and GPU equal bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from verifier.plan.digest_definition import BLOCK_BYTES, COLUMNS, GOLDEN, KEYS, ROWS, mix

_REFERENCE_BLOCKS = 256
"""Number of blocks (4 MiB of data) that the reference widens to 64 bits at a time."""


def lane_sums_numpy(data: torch.Tensor | np.ndarray) -> tuple[int, int]:
    """Return both lanes' sums of a uint8 vector [num_bytes] on the host, zero-padded.

    It widens `_REFERENCE_BLOCKS` blocks at a time and so needs about 40 MiB of memory beside the data.
    """
    keys = KEYS.astype(np.uint64).reshape(2, ROWS // 2, 2, 1)
    sums = np.zeros(2, dtype=np.uint64)
    for first in range(0, -(-data.nbytes // BLOCK_BYTES), _REFERENCE_BLOCKS):
        piece = np.asarray(data[first * BLOCK_BYTES : (first + _REFERENCE_BLOCKS) * BLOCK_BYTES])
        words = np.pad(piece, (0, -piece.size % BLOCK_BYTES)).view(np.uint32).astype(np.uint64)
        keyed = words.reshape(-1, 1, ROWS // 2, 2, COLUMNS) ^ keys
        streams = (keyed[..., 0, :] * keyed[..., 1, :]).sum(axis=2)
        number = np.arange(len(streams) * COLUMNS, dtype=np.uint64) + (first * COLUMNS + 1)
        sums += mix(streams + number.reshape(-1, 1, COLUMNS) * GOLDEN).sum(axis=(0, 2))
    low, high = sums.tolist()
    return low, high
