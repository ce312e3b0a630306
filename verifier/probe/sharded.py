"""Tensors that torch divides among processes, `DTensor`: those of FSDP2, and of tensor parallelism by torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Named = Iterable[tuple[str, Any]] | Mapping[str, Any]
"""Names of a checkpoint and whole tensors, or numpy arrays: pairs, a generator of them, or a state dict.

DTensors are gathered, one after another, so all processes of their mesh make the same calls.
"""


def is_sharded(value: Any) -> bool:
    """Tell whether a value is a DTensor."""
    return hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """The whole of a DTensor, which every process of its mesh asks for at once; any other value as it is."""
    return value.detach().full_tensor() if is_sharded(value) else value


def local(value: Any) -> Any:
    """Part of a DTensor that this process holds, in the same memory; any other value as it is."""
    return value.detach().to_local() if is_sharded(value) else value


def is_partial(value: Any) -> bool:
    """Tell whether a value is a DTensor whose parts are yet to be added up, as gradients of what is replicated."""
    return is_sharded(value) and any(placement.is_partial() for placement in value.placements)


def stands_for(value: Any, rank: int) -> bool:
    """Tell whether this process counts for its part: the first of those that hold the same; rank 0 for no DTensor.

    The sum of a partial value is whole on each process.
    """
    if not is_sharded(value):
        return rank == 0
    places = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
    return all(place == 0 or (placement.is_shard() and not is_partial(value)) for place, placement in places)


def pairs_of(named: Named) -> Iterator[tuple[str, Any]]:
    """Names and tensors of pairs or of a mapping; of a DTensor the whole."""
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        yield name, whole(tensor)
