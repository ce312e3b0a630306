"""Probes of an engine: what its ranks received, and what they hold; no torch but of what was sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from verifier.core import store
from verifier.core.record import Probe
from verifier.core.store import Recorder
from verifier.engine.api import EngineSlice, EngineTensor, Poisoned
from verifier.engine.client import EngineClient
from verifier.stages.engine.records import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    EngineServed,
    ExpectedView,
    HeldTensorRecord,
    LoadedNames,
    Poison,
    QuantizedNames,
    SyncedSettings,
    SyncedTensor,
)
from verifier.stages.plan.records import PlanDigest
from verifier.stages.transport.records import ReceivedTensor
from verifier.trainer.observer import TransferObserver

if TYPE_CHECKING:
    import torch

    from verifier.engine.sender import Delivery
    from verifier.transport.wire import Agreement, Received

WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""Dtype -> those that have every value of it."""


class TransferProbe(TransferObserver):
    """Evidence of one weight transfer, on trainer rank 0.

    Args:
        ranks: recorders by engine rank; none of a transfer that is not recorded.
        version: of the weights.
        keeps: whether what was sent is copied to the host, which a sync that nobody judges does without.

    Attributes:
        sent: every tensor that the engine confirmed, by name, on the host; as it was drawn, so that a buffer which
            changed on the way differs from it.
    """

    def __init__(self, ranks: Sequence[Probe], version: int, *, keeps: bool = True) -> None:
        super().__init__(version)
        self._ranks, self._keeps = ranks, keeps
        self.sent: dict[str, torch.Tensor] = {}
        self._drawn: dict[str, torch.Tensor] = {}

    def poisoned(self, outcomes: Sequence[Sequence[Poisoned]]) -> None:
        """Record the effect of the poison on each tensor of every engine rank."""
        for rank, found in enumerate(outcomes if self._ranks else ()):
            how = {item.name: item.how for item in found}
            self._ranks[rank].emit(Poison(name=f"engine rank {rank}", version=self.version, outcomes=how))

    def agreed(self, agreement: Agreement) -> None:
        """Record the plan that each engine rank holds; the first member is the sender."""
        for rank, digest in enumerate(agreement.messages[1:] if self._ranks else ()):
            self._ranks[rank].emit(PlanDigest(name="chunk plan", version=self.version, digest=digest))

    def drawn(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of what is going to be packed."""
        import torch

        if self._keeps:
            self._drawn[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def delivered(self, delivery: Delivery) -> None:
        """Record what every engine rank received in a chunk, and what its loader reported."""
        version = self.version
        if self._keeps:
            self.sent |= {name: self._drawn.pop(name) for name in delivery.packed.chunk.names}
        for receipt in delivery.receipts if self._ranks else ():
            probe, chunk, refused = self._ranks[receipt.rank], receipt.chunk, receipt.refused or ""
            for item in receipt.received:
                probe.emit(ReceivedTensor(version=version, chunk=chunk, **_facts(item)))
            names = tuple(receipt.loaded)
            probe.emit(LoadedNames(name=f"chunk {chunk}", version=version, names=names, refused=refused))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Contents of all ranks of an engine at one moment, by rank."""

    tensors: Sequence[Sequence[EngineTensor]]
    settings: Sequence[Sequence[tuple[str, Mapping[str, str]]]]

    def record(
        self,
        probes: Sequence[Probe],
        version: int,
        tensor: type[HeldTensorRecord] = SyncedTensor,
        module: type[SyncedSettings | ColdSettings] = SyncedSettings,
    ) -> None:
        """Record an engine, by default a synced one: one fact for each tensor and for each module with settings."""
        for probe, tensors, settings in zip(probes, self.tensors, self.settings, strict=True):
            for item in tensors:
                sort: Any = item.kind
                probe.emit(tensor(version=version, sort=sort, **_facts(item)))
            for name, values in settings:
                probe.emit(module(name=name or "the model", version=version, values=dict(values)))

    def record_cold(self, trace: Path, version: int) -> None:
        """Record an engine that loaded the weights of a version at its start."""
        probes = [store.Recorder(trace, "cold", rank) for rank in range(len(self.tensors))]
        self.record(probes, version, ColdTensor, ColdSettings)
        for probe in probes:
            probe.close()


def held_by(client: EngineClient) -> EngineState:
    """Ask an engine."""
    return EngineState(tensors=client.state(), settings=client.call("verifier.engine.settings:read_settings"))


def views_of(slices: Sequence[EngineSlice], version: int) -> Iterator[CheckpointView]:
    """The checkpoint slices that one engine rank holds, but for those that it quantized."""
    seen = {item.name for item in slices if item.quantized}
    for item in slices:
        if not item.quantized:
            name = f"{item.name} in {item.holder}" if item.name in seen else item.name
            seen.add(item.name)
            box = tuple((int(begin), int(end)) for begin, end in item.box)
            facts = _facts(item) | {"name": name}
            yield CheckpointView(version=version, tensor=item.name, holder=item.holder, box=box, **facts)


def record_views(probe: Probe, slices: Sequence[EngineSlice], sent: Mapping[str, torch.Tensor], version: int) -> None:
    """The checkpoint slices that one engine rank holds, beside what was sent, whole and by name, cut to them."""
    import torch

    from verifier.plan.digest import described

    def cut(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
        for dim, (begin, end) in enumerate(box):
            tensor = torch.atleast_1d(tensor).narrow(dim, begin, end - begin)
        return tensor

    def expect(name: str, tensor: torch.Tensor, box: Sequence[tuple[int, int]] = (), held: str = "") -> None:
        whole, tensor = tuple(tensor.shape), cut(tensor, box)
        facts, wider = described(tensor), {}
        if held in WIDER.get(facts["dtype"], ()):
            wider = {"wider_dtype": held, "wider_digest": described(tensor.to(getattr(torch, held)))["digest"]}
        probe.emit(ExpectedView(name=name, version=version, whole=whole, **facts, **wider))

    seen = {item.name for item in slices if item.quantized}
    if seen:
        probe.emit(QuantizedNames(name="quantized by the engine", version=version, names=tuple(sorted(seen))))
    for view in views_of(slices, version):
        seen.add(view.tensor)
        whole = sent.get(view.tensor)
        if not view.holder and whole is not None:
            view = replace(view, **described(cut(whole, view.box)))
        if view.holder or whole is not None:
            probe.emit(view)
        if whole is not None:
            expect(view.name, whole, view.box, view.dtype)
    for name in sent.keys() - seen:
        expect(name, sent[name])


def _facts(item: EngineTensor | EngineSlice | Received) -> dict[str, Any]:
    return {"name": item.name, "digest": item.digest, "dtype": item.dtype, "shape": tuple(item.shape)}


class EvidenceBefore:
    """Length of what a trace has of engines before an attempt, which may fail and is then made again."""

    def __init__(self, trace: str | None, ranks: int) -> None:
        folder = None if trace is None else Path(trace) / "evidence"
        files = [] if folder is None else [folder / f"engine-{rank:04d}.jsonl" for rank in range(ranks)]
        self._sizes = {file: file.stat().st_size if file.exists() else 0 for file in files}

    def restore(self) -> None:
        """Remove what was recorded since, once its recorders are closed."""
        for file, size in self._sizes.items():
            if not size:
                file.unlink(missing_ok=True)
            elif file.exists():
                os.truncate(file, size)


class HeldEngine:
    """Contents of engines: as they started, after each sync, and before the next.

    Args:
        client: of engines that were sent nothing yet.
        sleeps: they sleep between syncs, and are asked right after each alone.
    """

    def __init__(self, client: EngineClient, *, sleeps: bool) -> None:
        self._client = client
        self._cold = self._held = None if sleeps else held_by(client)
        self._version: int | None = None

    def record_served(self, probes: Sequence[Probe], version: int) -> None:
        """Record how they differ from what they held after the last sync.

        Args:
            probes: by engine rank.
            version: by which they answered, if they were sent nothing yet.
        """
        if self._held is None:
            return
        found = held_by(self._client)
        number = version if self._version is None else self._version
        for probe, before, after in zip(probes, self._held.tensors, found.tensors, strict=True):
            was, now = ({item.name: item.digest for item in side} for side in (before, after))
            changed = tuple(each for each in was | now if was.get(each) != now.get(each))
            name = "the engine between two syncs"
            probe.emit(EngineServed(name=name, version=number, num_tensors=len(after), changed=changed))

    def synced(self, version: int, probes: Sequence[Probe] = ()) -> None:
        """Look at what they hold after a sync.

        Args:
            version: that was sent.
            probes: by engine rank, which record it, beside settings and buffers of their start; none for no evidence.
        """
        found, self._version = held_by(self._client), version
        if probes:
            found.record(probes, version)
        if self._cold is None:
            return
        self._held = found
        if probes:
            buffers = [[item for item in rank if item.kind == "buffer"] for rank in self._cold.tensors]
            EngineState(tensors=buffers, settings=self._cold.settings).record(probes, version, ColdTensor, ColdSettings)


def record_held(
    trace: Path, views: Sequence[Sequence[EngineSlice]], sent: Mapping[str, torch.Tensor], version: int
) -> None:
    """Record what each engine rank holds, beside what it should hold as a version, whole and by name."""
    for rank, slices in enumerate(views):
        with contextlib.closing(Recorder(trace, "engine", rank)) as probe:
            record_views(probe, slices, sent, version)
