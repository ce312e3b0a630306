"""Elements of what a rank has given to be written into a checkpoint or has stepped, and of its files afterwards."""

from __future__ import annotations

import io
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TENSORS = 4
"""Tensors of each kind that are read back from a checkpoint, at most: of weights, of masters, of either moment."""
ELEMENTS = 64
"""Elements of each, at most."""
MOST = 2**24
"""Elements of the largest tensor that is read back; its file is read as a whole."""
_STATE = "optimizer.state."
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PARTS = ("param", "exp_avg", "exp_avg_sq")
"""Names in a checkpoint of masters and both moments."""

Facts = list[dict[str, Any]]
"""Tensors by name, with the bits that were given and those that were written: none where one is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Elements of a parameter that this rank's optimizer steps, as an update left them."""

    chunk: int
    local: str
    """Name of the parameter in its model chunk, without wrappers."""
    begin: int
    """Index of the first in the flattened parameter."""
    states: Sequence[torch.Tensor]
    """Masters, both moments, and weights; or weights alone."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Elements of one tensor that a rank gave to be written, or has stepped."""

    key: str
    offset: tuple[int, ...]
    """Place of its first element in the tensor of all ranks."""
    bits: list[int]
    places: torch.Tensor
    """Indices of the elements in the flattened tensor."""
    is_stepped: bool = False

    @property
    def name(self) -> str:
        """Name in the checkpoint, with its place where that is not the beginning."""
        name = f"{self.key}{list(self.offset)}" if any(self.offset) else self.key
        return f"{name} after the last update" if self.is_stepped else name


class Written:
    """Some tensors of a save, others in each, so that every tensor has its turn.

    `state` is what megatron-core is given to write, `turn` the name of the save, and `stepped` what the last update
    left of some parameters; ranks that do not write them read them back too.

    Source:
        megatron-core 0.19.2, core/dist_checkpointing/mapping.py, `ShardedTensor`: a rank writes its main replicas.
    """

    def __init__(self, state: Any, turn: str, stepped: Sequence[Stepped] = ()) -> None:
        kinds: dict[str, list[Any]] = defaultdict(list)
        for item in _tensors_in(state):
            kinds[item.key.removeprefix(_STATE).partition(".")[0] if _STATE in item.key else ""].append(item)
        chosen = [
            item
            for items in kinds.values()
            for item in sorted(items, key=lambda item: zlib.crc32(f"{turn} {item.key} {item.global_offset}".encode()))[
                :TENSORS
            ]
        ]
        self._given = []
        for item in chosen:
            places = _spread(0, item.data.numel())
            self._given.append(_Given(item.key, tuple(item.global_offset), _bits(item.data, places), places))
        for own in stepped:
            self._given += _of_update(own, state.get(f"model{own.chunk}", {}))

    def read(self, folder: Path) -> Facts:
        """Read the same elements from the files of the checkpoint.

        Source:
            torch 2.11.0, distributed/checkpoint/filesystem.py, `FileSystemReader.read_data`.
        """
        from torch.distributed.checkpoint import FileSystemReader

        places = {
            (key.fqn, tuple(key.offset)): place
            for key, place in FileSystemReader(folder).read_metadata().storage_data.items()
            if key.offset is not None
        }
        found: Facts = []
        for given in self._given:
            place, bits = places.get((given.key, given.offset)), list[int]()
            if place is None and given.is_stepped:  # it is cut before it is written
                continue
            if place is not None:
                with (folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    content = io.BytesIO(file.read(place.length))
                bits = _bits(torch.load(content, map_location="cpu", weights_only=True), given.places)
            found.append({"name": given.name, "given": given.bits, "written": bits})
        return found


def _tensors_in(state: Any) -> Iterator[Any]:
    """Sharded tensors that this rank writes, as they are."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors_in(value)
    elif (
        isinstance(state, ShardedTensor)
        and state.data is not None
        and is_main_replica(state.replica_id)
        and 0 < math.prod(state.local_shape) <= MOST
    ):
        yield state


def _of_update(own: Stepped, model: Mapping[str, Any]) -> Iterator[_Given]:
    """Elements of what an update left of a parameter, by the names that the checkpoint has for it."""
    item = model.get(own.local.replace(".to_wrap.", "."))
    if item is None or not hasattr(item, "global_offset") or math.prod(item.local_shape) > MOST:
        return
    *optimizer, weights = own.states
    within = _spread(0, len(weights))
    keys = [f"{_STATE}{part}.{item.key}" for part in _PARTS[: len(optimizer)]]
    for key, values in zip((*keys, item.key), (*optimizer, weights), strict=True):
        yield _Given(key, tuple(item.global_offset), _bits(values, within), own.begin + within, is_stepped=True)


def _spread(begin: int, end: int) -> torch.Tensor:
    return torch.linspace(begin, end - 1, min(ELEMENTS, end - begin), dtype=torch.float64).long()


@torch.no_grad()
def _bits(tensor: torch.Tensor, places: torch.Tensor) -> list[int]:
    values = tensor.detach().reshape(-1)[places.to(tensor.device)].cpu()
    found: list[int] = values.view(_BITS[values.element_size()]).tolist()
    return found
