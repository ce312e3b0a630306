"""Probes of the trainer side: live shards, what they must hold, the export stream, the plan.

A probe only looks: it digests what passes and hands it on as it was.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.core.record import Probe, TensorRecord, real
from verifier.core.records_weights import (
    ExpectedShard,
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    ExportedTensor,
    ExportStream,
    PlanDigest,
    PlannedTensor,
    Reread,
    SavedCheckpoint,
    SavedTensor,
    ShardRecord,
    SourceTensor,
)
from verifier.errors import ContractError
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout
from verifier.export.sharding import ParamPlacement, unshard
from verifier.mesh import Mesh
from verifier.model.checkpoint import INDEX, Checkpoint, write_shard
from verifier.model.families import copies_of
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan
from verifier.plan.digest import digest_tensor, digest_tensors
from verifier.train.lora_megatron import further_settings, read_adapter
from verifier.transport.buffer import dtype_name

if TYPE_CHECKING:
    import torch

    from verifier.export.adapters import AdapterLayout

IGNORED_BUFFERS = frozenset({"local_tokens_per_expert"})
"""Counters of one step that no checkpoint carries."""


def described(tensor: torch.Tensor, digest: str = "") -> dict[str, Any]:
    """Fields of a `TensorRecord`: digest, if it is not known yet, dtype and shape."""
    shape = tuple(tensor.shape)
    return {"digest": digest or digest_tensor(tensor), "dtype": dtype_name(tensor.dtype), "shape": shape}


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
        self._chunks = [_unwrapped(chunk) for chunk in chunks]
        self._stored = [frozenset(chunk.state_dict(keep_vars=True)) for chunk in self._chunks]
        self._layout, self._mesh, self._rank, self._part = layout, mesh, rank, part
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
        return self._places_of(self._rank)

    def _places_of(self, rank: int) -> dict[tuple[int, str], ParamPlacement]:
        return {
            (chunk, item.param_name): item
            for chunk in range(self._mesh.vpp if self._layout is not None else 0)
            for item in self._layout.placements(self._mesh, rank, chunk)
        }

    def described(self) -> frozenset[str]:
        """Checkpoint tensors that the layout places on some rank; empty without a layout."""
        ranks = range(self._mesh.world_size)
        return frozenset(name for rank in ranks for place in self._places_of(rank).values() for name in place.sources)

    def record(self, probe: Probe, version: int, *kinds: type[ShardRecord]) -> None:
        """Digest every live tensor, recorded as each of `kinds`; the device is waited for once, not for each tensor."""
        found = list(self.tensors())
        digests = digest_tensors(tensor for _, _, tensor in found)
        for (chunk, name, tensor), digest in zip(found, digests, strict=True):
            place = self.places.get((chunk, name))
            for kind in kinds:
                probe.emit(
                    kind(
                        name=place.global_name if place else f"{name} (chunk {chunk})", version=version,
                        replica=place.group if place else f"rank {self._rank} {chunk} {name}", coordinate=str(self._at),
                        **described(tensor, digest),
                    )
                )  # fmt: skip

    def record_expected(self, probe: Probe, source: Checkpoint) -> None:
        """Digest, for every placement, what the checkpoint says must be there."""
        for place in self.places.values():
            facts, sources = described(place.shard(source.read)), tuple(place.sources)
            probe.emit(ExpectedShard(name=place.global_name, coordinate=str(self._at), sources=sources, **facts))

    def dump(self, path: Path, tensors: Iterable[tuple[int, str, torch.Tensor]]) -> None:
        """Write what this rank owns of every group of replicas into the folder of all ranks' shards, for `join`.

        Args:
            path: of that folder.
            tensors: (chunk, local name, contents): `tensors()`, or gradients in their place.
        """
        owned = {}
        for chunk, name, tensor in tensors:
            place = self.places.get((chunk, name))
            if place is not None and all(getattr(self._at, axis) == 0 for axis in place.replicated_over):
                owned[f"{chunk}/{name}"] = tensor.cpu().contiguous().clone()
        write_shard(path / f"rank-{self._rank:04d}.safetensors", owned)

    def join(self, path: Path, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """Checkpoint tensors, or gradients by them, from the shards of all ranks, joined without Megatron-Bridge.

        Raises:
            ContractError: a shard is absent, or the shards do not tile a checkpoint tensor.
        """
        from safetensors import safe_open

        owners: dict[str, tuple[ParamPlacement, torch.Tensor]] = {}
        for rank in range(self._mesh.world_size):
            with safe_open(path / f"rank-{rank:04d}.safetensors", framework="pt") as file:
                held = set(file.keys())
                for (chunk, name), place in self._places_of(rank).items():
                    key = f"{chunk}/{name}"
                    if place.group not in owners and key in held:
                        owners[place.group] = (place, file.get_tensor(key))
        whole = unshard((owners.pop(group) for group in [*owners]), gradients=gradients)
        if not whole:
            raise ContractError("no rank dumped a shard: there is nothing to join")
        return whole


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def record_tensors(
    probe: Probe, kind: type[TensorRecord], tensors: Iterable[tuple[str, torch.Tensor]], version: int = 0
) -> None:
    """Digest named tensors one by one."""
    for name, tensor in tensors:
        probe.emit(kind(name=name, version=version, **described(tensor)))


def record_exported_adapter(probe: Probe, path: Path, version: int) -> None:
    """Digest the matrices of an adapter's folder, with its scaling and what else its configuration asks for."""
    found, scaling = read_adapter(path)
    record_tensors(probe, ExportedAdapterMatrix, found.items(), version)
    further = further_settings(path)
    probe.emit(ExportedAdapterScaling(name="alpha / rank", version=version, scaling=real(scaling), further=further))


def record_source(probe: Probe, source: Checkpoint) -> None:
    """Digest the source checkpoint, tensor by tensor."""
    for item in source_tensors(source):
        probe.emit(item)


def source_tensors(source: Checkpoint) -> Iterator[SourceTensor]:
    """Each tensor of the source checkpoint as it is recorded, with its digest."""
    copies = copies_of(source.config)
    for name in source.names():
        yield SourceTensor(name=name, copy_of=copies.get(name, ""), **described(source.read(name)))


def recorded(
    probe: Probe, stream: Iterable[tuple[str, torch.Tensor]], version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The export stream, digested as it passes; and again what is still held where a later one shares its memory."""
    held: dict[int, list[tuple[str, str, weakref.ref[torch.Tensor]]]] = {}  # by where their memory begins
    reread: dict[str, Reread] = {}
    count = 0
    for name, tensor in stream:
        digest = digest_tensor(tensor)
        probe.emit(ExportedTensor(name=name, version=version, **described(tensor, digest)))
        neighbours = held.setdefault(tensor.untyped_storage().data_ptr(), [])
        neighbours[:] = [item for item in neighbours if item[2]() is not None]
        for earlier, was, reference in neighbours:
            other = reference()
            known = reread.get(earlier)
            if other is None or not _share_memory(other, tensor) or (known and known.still_held != was):
                continue
            reread[earlier] = Reread(name=earlier, handed_over=was, still_held=digest_tensor(other))
        neighbours.append((name, digest, weakref.ref(tensor)))
        count += 1
        yield name, tensor
    probe.emit(ExportStream(name="the export", version=version, num_tensors=count, reread=tuple(reread.values())))


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if some byte between the first and the last of one tensor is one of the other's range too."""
    ends = []
    for item in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
        ends.append(item.data_ptr() + (last + 1) * item.element_size())
    return max(one.data_ptr(), other.data_ptr()) < min(ends)


def record_saved(probe: Probe, folder: Path, version: int) -> None:
    """Tensors that a reader finds in a saved checkpoint, by the names and files of its index."""
    from safetensors import safe_open

    shards = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    absent = set(listed)
    for path in shards:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if listed and listed.get(name) != path.name:
                    continue
                absent.discard(name)
                facts = described(file.get_tensor(name))
                probe.emit(SavedTensor(name=name, version=version, shard=path.name, **facts))
    probe.emit(SavedCheckpoint(name="shards", version=version, shards=len(shards), missing=tuple(sorted(absent))))


def plan_of(stream: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int) -> ChunkPlan:
    """The chunk plan of an export stream, which is consumed; contents are not kept."""
    return build_plan(
        (TensorMeta(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape)) for name, tensor in stream),
        chunk_bytes=chunk_bytes,
    )


def record_plan(probe: Probe, plan: ChunkPlan, *, entries: bool) -> None:
    """The plan's digest and, from one rank, its entries."""
    tensors, num_chunks = tuple(plan.tensors), len(plan.chunks)
    probe.emit(PlanDigest(name="chunk plan", digest=plan.digest, num_chunks=num_chunks, num_tensors=len(tensors)))
    for tensor in tensors if entries else ():
        probe.emit(PlannedTensor(name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape)))
