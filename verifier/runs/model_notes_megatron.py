"""Reading of a checkpoint by megatron-bridge, on a rank of its own, which builds no model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.model.bridge_reading_megatron import notes_on, read_bridge

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def run(context: RankContext) -> dict[str, Any]:
    """Rank function: sentences on `checkpoint`, of which `tensors` are to be exported."""
    tensors = context.args["tensors"]
    reading = read_bridge(Path(context.args["checkpoint"]), tensors)
    return {"notes": notes_on(reading, len(tensors)), "headless": reading.headless}
