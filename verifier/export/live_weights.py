"""Live weights of one rank: its parameters and checkpointed buffers, and what a layout says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.errors import ContractError
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout
from verifier.export.sharding import ParamPlacement, joined_in_turn, require_tiling, unshard
from verifier.mesh import Mesh
from verifier.model.checkpoint import write_shards

if TYPE_CHECKING:
    import torch

    from verifier.export.names import AdapterLayout

IGNORED_BUFFERS = frozenset({"local_tokens_per_expert"})
"""Counters of one step that no checkpoint carries."""


class LiveWeights:
    """The parameters and checkpointed buffers that one rank's model chunks hold right now.

    Args:
        chunks: the rank's model chunks in virtual-stage order, wrapped for training or not.
        layout: where checkpoint tensors live, or None where the family has no row and none was derived.
        mesh: parallel sizes.
        rank: this rank.
        part: local name -> the name that a tensor goes by, or None for one that is left out.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        layout: ModelLayout | DerivedLayout | AdapterLayout | None,
        mesh: Mesh,
        rank: int,
        part: Callable[[str], str | None] = str,
    ) -> None:
        self._chunks = [unwrapped(chunk) for chunk in chunks]
        self._stored = [frozenset(chunk.state_dict(keep_vars=True)) for chunk in self._chunks]
        self._layout, self._mesh, self.rank, self._part = layout, mesh, rank, part
        self._at = mesh.coordinate(rank)

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(chunk, local name, live tensor) of every parameter and every checkpointed buffer."""
        for index, (chunk, stored) in enumerate(zip(self._chunks, self._stored, strict=True)):
            buffers = chunk.named_buffers()
            kept = (item for item in buffers if item[0] in stored and item[0].rpartition(".")[2] not in IGNORED_BUFFERS)
            for local, tensor in (*chunk.named_parameters(), *kept):
                if name := self._part(local):
                    yield index, name, tensor.detach()

    @property
    def coordinate(self) -> str:
        """Mesh coordinate of this rank."""
        return str(self._at)

    @cached_property
    def places(self) -> dict[tuple[int, str], ParamPlacement]:
        """(chunk, local name) to what must be there; empty without a layout."""
        return self._places_of(self.rank)

    def _places_of(self, rank: int) -> dict[tuple[int, str], ParamPlacement]:
        layout = self._layout
        if layout is None:
            return {}
        places = ((chunk, layout.placements(self._mesh, rank, chunk)) for chunk in range(self._mesh.vpp))
        return {(chunk, item.param_name): item for chunk, own in places for item in own}

    def described(self) -> frozenset[str]:
        """Checkpoint tensors that the layout places on some rank; empty without a layout."""
        ranks = range(self._mesh.world_size)
        return frozenset(name for rank in ranks for place in self._places_of(rank).values() for name in place.sources)

    @cached_property
    def owns_all(self) -> bool:
        """Every group of replicas has its first copy on rank 0: nothing is split over ranks."""
        others = range(1, self._mesh.world_size)
        return bool(self._owned_by(0)) and not any(map(self._owned_by, others))

    def _owned_by(self, rank: int) -> dict[tuple[int, str], ParamPlacement]:
        at = self._mesh.coordinate(rank)
        every = self._places_of(rank).items()
        return {key: place for key, place in every if all(getattr(at, axis) == 0 for axis in place.replicated_over)}

    def dump(self, path: Path, tensors: Iterable[tuple[int, str, torch.Tensor]]) -> None:
        """Write what this rank owns of every group of replicas into the folder of all ranks' shards, for `join`.

        Args:
            path: of that folder.
            tensors: (chunk, local name, contents): `tensors()`, or gradients in their place; see `write_shards`.
        """
        places = self._owned_by(self.rank)
        owned = ((f"{chunk}/{name}", tensor) for chunk, name, tensor in tensors if (chunk, name) in places)
        write_shards(path / f"rank-{self.rank:04d}", owned)

    def join_own(
        self, tensors: Iterable[tuple[int, str, torch.Tensor]], *, gradients: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Do what `dump` and `join` do, in memory and tensor by tensor, on rank 0 where it `owns_all`."""
        every = self._owned_by(0)
        places = {key: every[key] for key in {place.group: key for key, place in reversed(every.items())}.values()}
        require_tiling(places.values())
        shards = ((places[chunk, name], tensor) for chunk, name, tensor in tensors if (chunk, name) in places)
        return joined_in_turn(shards, gradients=gradients)

    def join(self, path: Path, *, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint tensors, or gradients by them, from the shards of all ranks, joined without Megatron-Bridge.

        Raises:
            ContractError: a shard is absent, or the shards do not tile a checkpoint tensor.
        """
        from safetensors import safe_open

        owners: dict[str, tuple[ParamPlacement, torch.Tensor]] = {}
        for rank in range(self._mesh.world_size):
            held: dict[str, torch.Tensor] = {}  # mapped
            for shard in sorted(path.glob(f"rank-{rank:04d}-*.safetensors")):
                file: Any = safe_open(shard, framework="pt")
                held |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            for (chunk, name), place in self._places_of(rank).items():
                if place.group not in owners and (tensor := held.get(f"{chunk}/{name}")) is not None:
                    owners[place.group] = (place, tensor)
        if not owners:
            raise ContractError("no rank dumped a shard: there is nothing to join")
        return unshard(owners.values(), gradients=gradients)


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The module within all wrappers of a model chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
