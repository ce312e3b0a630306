"""What test_fork_launcher.py gathers on ranks."""

from __future__ import annotations

from verifier.launch.rank import RankContext
from verifier.platform.gather_json import agree, gather_json


def gather(context: RankContext) -> list:
    """Values of different lengths, with floats that decimals do not hold."""
    rows = gather_json({"rank": context.rank, "text": "x" * 1000 * context.rank, "third": 1 / 3})
    return [rows, gather_json([]), agree("plan"), agree(f"plan of {context.rank // 2}")]
