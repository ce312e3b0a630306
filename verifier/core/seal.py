"""Seals: checksums of values where one process hands them to another, so that a check can tell them again."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING
from unicodedata import normalize

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


NO_SEAL = -1
"""Seal of what there is none of."""


def seal_of_array(values: np.ndarray) -> int:
    """Checksum of an array's bytes; equal for two arrays of one dtype that are bitwise equal.

    CRC-32 tells any two that differ in up to 32 bits in a row, and others but for one in four billion.
    """
    return zlib.crc32(values.tobytes())


def seal_of_reply(turns: Sequence[str], said: str) -> int:
    """Checksum of what an environment says, in composed form (Unicode's NFC), and of the turns that it was given."""
    return zlib.crc32(msgspec.json.encode((turns, normalize("NFC", said))))


def seal_of_reward(text: str, answer: str | None, reward: float) -> int:
    """Checksum of a reward and of the answer and the gold answer, empty for none, that it was given for."""
    return zlib.crc32(msgspec.json.encode((text, answer or "", reward)))
