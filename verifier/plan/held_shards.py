"""Shards that the ranks of a mesh hold by a layout: equal ranks once, owner and copies of each, and what is amiss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from verifier.export.sharding import ParamPlacement, tiling_errors
from verifier.mesh import Coordinate, Mesh

_NAMED = 3
"""Names that a sentence gives of many."""


class Layout(Protocol):
    """Places of a model's tensors; a function of a rank's coordinates tp, pp, ep and etp alone."""

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List the parameters and checkpointed buffers of one model chunk of a rank, in the model's order."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Shards of all ranks with the same coordinates on tp, pp, ep and etp."""

    ranks: tuple[int, ...]
    at: Coordinate
    """Coordinates of the first of the ranks."""
    chunks: tuple[tuple[ParamPlacement, ...], ...]
    """[virtual stage] placements."""

    @cached_property
    def places(self) -> tuple[ParamPlacement, ...]:
        """Placements of all virtual stages."""
        return tuple(place for chunk in self.chunks for place in chunk)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements of each of the placements."""
        return tuple(math.prod(place.shape) for place in self.places)

    def count(self, *, expert: bool) -> int:
        """Elements of the parameters of routed experts, or of all other parameters; buffers are none."""
        return sum(
            size for place, size in zip(self.places, self.elements, strict=True)
            if not place.is_buffer and is_expert(place) == expert
        )  # fmt: skip


def is_expert(place: ParamPlacement) -> bool:
    """True for a tensor of a routed expert."""
    return "edp" in place.replicated_over


def holdings_of(layout: Layout, mesh: Mesh) -> tuple[Holding, ...]:
    """Return what the ranks hold, in the order of the first rank of each holding.

    Raises:
        UsageError: the mesh does not divide the layers, the experts or a tensor.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        alike[at.pp, at.tp, at.ep, at.etp].append(rank)
    return tuple(
        Holding(
            ranks=tuple(ranks), at=mesh.coordinate(ranks[0]),
            chunks=tuple(tuple(layout.placements(mesh, ranks[0], chunk)) for chunk in range(mesh.vpp)),
        )
        for ranks in alike.values()
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """All copies of one shard."""

    place: ParamPlacement
    """Placement on the owner."""
    owner: int
    """Lowest rank that holds it."""
    copies: int
    """Ranks that hold it; a tied output layer is a further copy of the embedding."""


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Owner and number of copies of every shard, by the label of its copies."""

    replicas: Mapping[str, Replicas]
    differing: tuple[str, ...]
    """A sentence on each label whose copies are not the same part of the checkpoint."""

    def errors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yield a sentence on each way in which the owners do not hold every tensor exactly once."""
        yield from self.differing
        held: dict[str, tuple[int, ...]] = {}
        for item in self.replicas.values():
            held |= item.place.source_shapes
        if absent := [name for name in shapes if name not in held]:
            yield f"no rank owns {listed(absent)}"
        if surplus := [name for name in held if name not in shapes]:
            yield f"ranks hold {listed(surplus)}, which the checkpoint does not have"
        for name, shape in held.items():
            if name in shapes and shapes[name] != shape:
                yield f"`{name}` has shape {list(shapes[name])}, and ranks hold parts of {list(shape)}"
        yield from tiling_errors(item.place for item in self.replicas.values()).values()


def ownership_of(holdings: Sequence[Holding]) -> Ownership:
    """Return owner and copies of each shard."""
    found: dict[str, Replicas] = {}
    differing: list[str] = []
    for holding in holdings:
        lowest, copies = min(holding.ranks), len(holding.ranks)
        for place in holding.places:
            known = found.get(place.group)
            if known is None:
                found[place.group] = Replicas(place=place, owner=lowest, copies=copies)
                continue
            if known.place.boxes != place.boxes:
                differing.append(f"copies of {place.group} are other parts on rank {known.owner} and rank {lowest}")
            owner, first = (known.owner, known.place) if known.owner < lowest else (lowest, place)
            found[place.group] = Replicas(place=first, owner=owner, copies=known.copies + copies)
    return Ownership(replicas=found, differing=tuple(differing))


def listed(names: Sequence[str]) -> str:
    """Return the first names of many, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    return shown + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")
