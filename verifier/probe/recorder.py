"""The recorder of one process of a trainer: hand-overs in the field's terms, as the evidence that the checks read.

Tensors are digested or copied, never changed. Versions count the weights: 0 is what the loop begins with, step n trains
version n - 1 and leaves version n. Several processes record into one trace: rank 0 makes it, the others join it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verifier.config_json import texts_of
from verifier.core import store
from verifier.core.manifest import Manifest, MeshSizes
from verifier.core.reader import MANIFEST
from verifier.core.record import Array, Record, Role, real
from verifier.errors import UsageError
from verifier.plan.digest import dtype_name
from verifier.platform.provenance import origin_of
from verifier.probe.declared import UNDERTAKINGS, Undertaking
from verifier.probe.held_sender import Sender, meta_of
from verifier.probe.sharded import Named, is_sharded, pairs_of
from verifier.probe.state import HEAD, EngineRecorder
from verifier.probe.steps import DTYPES
from verifier.probe.tokens import mark_of, seal
from verifier.stages.export.probe_tensors import record_tensors, recorded
from verifier.stages.export.records import ExportedAdapterMatrix, ExportedAdapterScaling, ExportedTensor
from verifier.stages.loss.records import KeptGradients, KeptTensors
from verifier.stages.train.records import (
    JoinedTensor,
    KeptMatrices,
    KeptWeights,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    Update,
)
from verifier.stages.transport.records import Handover, ReceivedTensor

JOIN_S = 60.0
"""Seconds that a process waits for the one that makes the trace."""


class _Known(msgspec.Struct):
    mesh: MeshSizes | None = None
    world_size: int = 1


class LoopRecorder(EngineRecorder):
    """Hand-overs of one process; a context manager that closes.

    Args:
        path: trace directory that `verifier.probe.open` made.
        role: of the process.
        rank: within the role.
        model: checkpoint directory of version 0; empty if it is not known.
        keep_every: see `verifier.probe.open`.

    Raises:
        UsageError: the trace is sealed, or this rank has recorded into it.
    """

    def __init__(self, path: Path, role: Role, rank: int, *, model: str = "", keep_every: int = 0) -> None:
        super().__init__()
        self.path, self._role, self.rank, self.model, self._keep_every = path, role, rank, model, keep_every
        manifest = (path / MANIFEST).read_bytes()
        if b'"complete": true' in manifest:
            raise UsageError(f"the trace `{path}` is sealed: nothing can be added to it")
        if role == "trainer" and (path / "evidence" / f"{role}-{rank:04d}.jsonl").exists():
            raise UsageError(f"{role} rank {rank} has recorded into `{path}` before: choose another trace")
        self._recorder = store.Recorder(path, role, rank)
        self._mark = mark_of(path, role, rank)
        self._mark.touch()
        self._is_open = True
        known = msgspec.json.decode(manifest, type=_Known)
        self.mesh, self.world_size = known.mesh, max(known.world_size, 1)
        self._live: set[int] = set()
        self._chunks: dict[int, int] = {}
        self._exported: set[int] = set()
        self._sender = Sender(self.emit, is_first=rank == 0)

    def emit(self, record: Record, array: Array | Mapping[str, Array] | None = None) -> None:
        """Record one fact of any kind; see `verifier.core.store.Recorder.emit`."""
        self._recorder.emit(record, array)

    def __enter__(self) -> LoopRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(f"the loop ended by {kind.__name__}: {error}" if kind is not None else "")

    def close(self) -> None:
        """Close; the last trainer process to do so completes the trace.

        Raises:
            UsageError: the trace cannot be written.
        """
        self._end("")

    def _end(self, failure: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.flush()
        self.flush_updates()
        self._sender.flush()
        self._recorder.close()
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # of two that close at once, one sees that it is the last
            self._mark.unlink(missing_ok=True)
            if self._role == "trainer" and (failure or not list((self.path / "evidence").glob("*.partial"))):
                seal(self.path, failure)
        finally:
            os.close(folder)

    def weights_exported(self, named: Named, version: int, *, live: Named | None = None) -> None:
        """Record what the trainer hands to whatever brings it to the engine, before it goes.

        Args:
            named: checkpoint names and whole tensors, in the order in which they go.
            version: of the weights.
            live: what the trainer holds at that moment, under the same names, read apart from the export.
        """
        if live is not None:
            self._record_live(live, version)
        for _ in self.exporting(named, version, keep=live is None):
            pass

    def exporting(self, named: Named, version: int, *, keep: bool = True) -> Iterator[tuple[str, Any]]:
        """The same for a stream: pairs are recorded as they pass on to the sender."""
        if version == 0 and self.model and not self.rank and not self.has_source:
            self.has_source = True
            self._record_source()
        self._exported.add(version)
        self._sent.add(version)
        yield from self._passing(named, version, ExportedTensor, keep=keep)

    def sending(
        self, named: Named, version: int, *, live: Named | None = None, told: Any = None
    ) -> Iterator[tuple[str, Any]]:
        """The iterator of a weight transfer's sender: `weights_exported`, a chunk plan, and `weights_sent` at its end.

        The plan is made of `told`, of a list or dict of tensors, or of the first stream as it passes. Every transfer is
        held to it before its tensors pass.

        Args:
            named: checkpoint names and whole tensors, in the order in which they go: all of a version.
            version: of the weights.
            live: see `weights_exported`.
            told: what the receivers are told, by the names of vLLM's update_info: names, dtype_names, shapes.

        Raises:
            ContractError: the tensors depart from the plan; from the iterator, where they come as a stream.
            UsageError: the version was exported or sent before; `told` lacks a column.
        """
        if version in self._exported:
            raise UsageError(f"version {version} was exported or sent before: one call of `sending` records all of it")
        whole = list(pairs_of(named)) if isinstance(named, Mapping | list | tuple) else None
        given = None if whole is None else [meta_of(name, tensor) for name, tensor in whole]
        self._exported.add(version)
        self._sender.begin(version, given, told)
        if live is not None:
            self._record_live(live, version)
        pairs = self._sender.held(pairs_of(named)) if whole is None else whole
        return self._sender.passing(self.exporting(pairs, version, keep=live is None), version)

    def weights_received(self, named: Named, version: int) -> None:
        """One chunk that an engine rank received, before its loader has it; chunks are numbered as they come."""
        for _ in self.receiving(named, version):
            pass

    def receiving(self, named: Named, version: int) -> Iterator[tuple[str, Any]]:
        """The same for a stream: pairs are recorded as they pass on to the loader."""
        chunk = self._chunks[version] = self._chunks.get(version, -1) + 1
        yield from self._passing(named, version, ReceivedTensor, chunk=chunk)

    def weights_sent(self, version: int, refused: str = "") -> None:
        """The end of the transfer of a version, as the trainer sees it; `refused` says what ended it, if not its end.

        Each engine rank must then have received all that was exported.
        """
        self.emit(Handover(name=f"transfer of version {version}", version=version, refused=refused))

    def gradients(self, step: int, named: Named) -> None:
        """Gradients of a step as the optimizer gets them, summed over micro-batches and ranks, before any clip.

        They are copied on steps that `keep_every` names. Of an `optimizer` that is watched, its own are looked at here.
        None is no gradient: of a tensor that is trained, which a watched optimizer tells, that is judged.
        """
        self.reduced(step)
        if not self.keeps(step - 1):
            return
        given = {plain(name): tensor for name, tensor in pairs_of(named) if not self.rank}  # all ranks gather
        if not self.rank:
            kept = {name: tensor for name, tensor in given.items() if tensor is not None}
            watched = {*map(plain, (*(item.name for item in self._owned), *self._unowned))}
            lacking = tuple(sorted((watched or given.keys()) - kept.keys()))
            self._keep(KeptGradients, "gradients", step, kept, lacking=lacking)

    def keeps(self, version: int) -> bool:
        """Tell whether weights of a version, and the gradients of the step that trains them, are copied."""
        return self._keep_every > 0 and version % self._keep_every == 0

    def _record_live(self, live: Named, version: int) -> None:
        held = list(live.items() if isinstance(live, Mapping) else live)
        one_by_one = any(is_sharded(tensor) for _, tensor in held)
        for _ in self._passing(pairs_of(held) if one_by_one else held, version, JoinedTensor):
            pass
        known = version - 1 in self._live if version > 1 else self.has_source
        first = version not in self._live
        self._live.add(version)
        if version and known and first and not self.is_idle():
            self.emit(Update(name=f"step {version}", version=version, how="step"))

    def _passing(
        self, named: Named, version: int, kind: type[Any], *, keep: bool = True, **fields: Any
    ) -> Iterator[tuple[str, Any]]:
        """Pairs as they pass, each recorded; a list is digested at once, a stream tensor by tensor."""
        keeps = keep and kind is not ReceivedTensor and self.keeps(version) and not self.rank
        pairs, whole, kept = pairs_of(named), isinstance(named, Mapping | list | tuple), dict[str, Any]()
        if whole:
            held = list(pairs)
            record_tensors(self, kind, [(key, self.as_sent(kind, item)) for key, item in held], version, **fields)
            pairs = iter(held)
        elif kind is ExportedTensor:  # what is held while later tensors come is looked at again
            pairs = recorded(self, pairs, version)
        for name, tensor in pairs:
            if kind is not ExportedTensor and not whole:
                record_tensors(self, kind, [(name, self.as_sent(kind, tensor))], version, **fields)
            if keeps:
                kept[name] = tensor if whole else _copied(tensor)
            if kind is ExportedTensor and name == HEAD:
                self._heads.add("sent")
            yield name, tensor
        if keeps and version:  # version 0 is the checkpoint
            self._keep(KeptWeights, "weights", version, kept)

    def _keep(self, kind: type[KeptTensors], name: str, version: int, named: Named, **fields: Any) -> None:
        tensors = dict(pairs_of(named))
        dtypes = {key: dtype_name(tensor.dtype) for key, tensor in tensors.items()}
        self.emit(kind(name=name, version=version, dtypes=dtypes, **fields), tensors)

    def adapter_exported(
        self, named: Named, version: int, *, live: Named, scaling: float, live_scaling: float,
        further: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """An adapter as it goes to the engine, and as the trainer holds it: matrices, and alpha over rank.

        `further` are settings of its configuration beyond rank, alpha and linears. `live` is copied for versions that
        `keep_every` names.
        """
        held = [(plain(name), tensor) for name, tensor in pairs_of(live)]
        sent = ((plain(name), tensor) for name, tensor in pairs_of(named))
        record_tensors(self, ExportedAdapterMatrix, sent, version)
        record_tensors(self, LiveAdapterMatrix, held, version)
        told = texts_of(further or {})
        self.emit(ExportedAdapterScaling(name="scaling", version=version, scaling=real(scaling), further=told))
        self.emit(LiveAdapterScaling(name="scaling", version=version, scaling=real(live_scaling)))
        self._sent.add(version)
        if self.keeps(version) and not self.rank:
            self._keep(KeptMatrices, "matrices", version, held)


def plain(name: str) -> str:
    """Name of a peft parameter by the checkpoint's; others stay."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default.weight", ".weight")


def _copied(tensor: Any) -> Any:
    return tensor.detach().clone() if hasattr(tensor, "detach") else tensor.copy()


def open(  # noqa: A001 - `probe.open` is what a loop calls
    path: Path | str, *, model: Path | str = "", dtype: str = "", mesh: Mapping[str, int] | None = None,
    engine: str = "vllm", rank: int | None = None, world_size: int | None = None, keep_every: int = 0, sends: str = "",
    undertakes: Sequence[Undertaking] = (), config: Mapping[str, bool | int | float | str] | None = None,
) -> LoopRecorder:  # fmt: skip
    """A recorder of one trainer process; rank 0 makes the trace, others wait for it.

    Args:
        path: directory of the trace, absent or empty.
        model: HF directory of the weights that the loop begins with, with which an export of version 0 is compared.
        dtype: that the model computes in, that of autocast where there is one; by default of the first export.
        mesh: parallel sizes by the names of `verifier.mesh.Mesh`, for the report.
        engine: what samples, for the report.
        rank: of this process among those that record; by default of torch.distributed, of the variable RANK, or 0.
        world_size: number of them, by default of torch.distributed or WORLD_SIZE. With 1 only this process records.
        keep_every: copy weights and gradients of every n-th step, the first among them, for `verifier judge --oracle`;
            0 copies none.
        sends: dtype that weights are rounded to, once, on their way to the engine, where it is another than that of the
            checkpoint's files or of live weights: "bfloat16", "float16" or "float32", of all floating-point tensors.
        undertakes: what the loop says that it records: a check without this evidence is inconclusive.
        config: settings of the loop, for the report.

    Raises:
        UsageError: the trace exists, is another run's or cannot be written; no checkpoint; an unknown name or rank.
    """
    unknown = [name for name in undertakes if name not in UNDERTAKINGS]
    if unknown:
        raise UsageError(f"a loop cannot undertake `{unknown[0]}`: choose of {', '.join(UNDERTAKINGS)}")
    if sends not in ("", *DTYPES[:3]):
        raise UsageError(f"sends is `{sends}`: weights are sent as {', '.join(DTYPES[:3])}")
    if keep_every < 0:
        raise UsageError(f"keep_every is {keep_every}: 0 keeps nothing, 1 every step")
    path, (own, size) = Path(path), _place(rank, world_size)
    if not 0 <= own < size:
        raise UsageError(f"rank {own} is none of {size} ranks")
    if model and not (Path(model) / "config.json").is_file():
        raise UsageError(f"`{model}` is no checkpoint directory: it has no config.json")
    if model and importlib.util.find_spec("torch") is None:
        raise UsageError(f"the checkpoint `{model}` is read with torch, which is not installed: leave `model` out")
    if own == 0:
        try:
            sizes = None if mesh is None else msgspec.convert(dict(mesh), MeshSizes)
        except msgspec.ValidationError as problem:
            raise UsageError(f"the mesh {dict(mesh or {})} has no such sizes: {problem}") from problem
        known: dict[str, Any] = dict(config or {})
        store.create(
            path,
            Manifest(
                **origin_of(shlex.join(map(str, sys.argv)), _tier()), command="probe", began=store.now(),
                model=str(model), dtype=dtype, mesh=sizes, world_size=size, engine=engine,
                config={**known, "model": str(model), "undertakes": [*undertakes]},
            ),
        )  # fmt: skip
    record = _joined(path, "trainer", own, str(model), keep_every)
    record.sends = sends
    return record


def attach(path: Path | str, *, role: Role = "engine", rank: int = 0) -> LoopRecorder:
    """A recorder of another process than a trainer's, such as an engine's; it may attach again after it closed.

    Raises:
        UsageError: no process made the trace within a minute, or it is sealed.
    """
    return _joined(Path(path), role, rank, "", 0)


def _joined(path: Path, role: Role, rank: int, model: str, keep_every: int) -> LoopRecorder:
    until = time.monotonic() + JOIN_S
    while not (path / MANIFEST).exists():
        if time.monotonic() > until:
            raise UsageError(f"no process has made the trace `{path}` in {JOIN_S:g} s: rank 0 of the trainer opens it")
        time.sleep(0.05)
    return LoopRecorder(path, role, rank, model=model, keep_every=keep_every)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, or as the launcher of this process says."""
    if rank is None and world_size is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank or 0, 1 if world_size is None else world_size


def _tier() -> str:
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"
