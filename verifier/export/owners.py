"""The rank that holds an element of a checkpoint tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verifier.export.sharding import ParamPlacement
from verifier.mesh import Mesh


class Placed(Protocol):
    """A layout of a model or of an adapter."""

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List what one model chunk of a rank holds."""


class Owners:
    """Owner of every element of every checkpoint tensor; of several copies the lowest rank.

    Args:
        layout: where checkpoint tensors live.
        mesh: parallel sizes.
    """

    def __init__(self, layout: Placed, mesh: Mesh) -> None:
        self._boxes: dict[str, list[tuple[int, int, int, int]]] = {}
        for rank in range(mesh.world_size):
            for chunk in range(mesh.vpp):
                for place in layout.placements(mesh, rank, chunk):
                    for box in place.boxes:
                        self._boxes.setdefault(box.source, []).append((place.dim, box.begin, box.end, rank))

    def rank_of(self, name: str, index: Sequence[int]) -> int | None:
        """Rank that holds an element; None for a tensor that the layout does not have."""
        for dim, begin, end, rank in self._boxes.get(name, ()):
            if not index or begin <= index[dim] < end:
                return rank
        return None
