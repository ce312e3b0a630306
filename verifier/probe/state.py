"""Records of weights and state that a process holds: after a load, a step or an export, in files, in an engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from verifier.config_json import text_model, texts_of
from verifier.errors import UsageError
from verifier.plan.digest import described
from verifier.probe.optimizer import OptimizerRecorder
from verifier.probe.sharded import Named, pairs_of, whole
from verifier.stages.checkpoint.probe_written import record_written
from verifier.stages.checkpoint.records import LoadedState, SavedState
from verifier.stages.engine.records import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    EngineRestart,
    EngineServed,
    KeptKeys,
    LoadedNames,
    Poison,
    SyncedSettings,
    SyncedTensor,
)
from verifier.stages.export.probe_tensors import (
    IndexedFiles,
    merged_matrix,
    record_files,
    record_saved,
    record_tensors,
    source_tensors,
)
from verifier.stages.export.records import ExportedConfig, ShardAfterExport, WrittenShard
from verifier.stages.load.records import ExpectedShard, LoadedShard, SourceConfig, SourceTensor
from verifier.stages.train.records import (
    FrozenShard,
    JoinedTensor,
    ShardAfterIdleStep,
    ShardAfterScoring,
    UpdatedShard,
)
from verifier.trainer.merge_rounding import merge_gap

Moment = Literal["load", "step", "scoring", "export", "idle step", "adapter step"]
MOMENTS: dict[str, Any] = {
    "load": LoadedShard,
    "step": UpdatedShard,
    "scoring": ShardAfterScoring,
    "export": ShardAfterExport,
    "idle step": ShardAfterIdleStep,
    "adapter step": FrozenShard,
}
HEAD = "lm_head.weight"
WRITTEN = 64
"""Elements of a tensor that are compared with the files of a checkpoint, at most."""
STATE_FILE = "verifier-state.json"
"""File beside a checkpoint that says what was held when it was saved."""


class StateRecorder(OptimizerRecorder):
    """Calls of one process on weights and state that it holds, in memory and in files."""

    model = ""
    has_source = False
    sends = ""
    """Dtype that weights are rounded to on their way to the engine; empty: they keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._stepped: set[int] = set()
        self._heads: set[str] = set()
        """Moments of weights held, or "sent", with a tied head under its own name."""

    def weights_held(self, named: Named, version: int, *, after: Moment) -> None:
        """Record weights that this process holds at a moment.

        After a "load" they are to be the checkpoint's, after a "step" those of every other process. "scoring",
        "export" and an "idle step", one with a rate of 0, move none of them, and an "adapter step" none of the base.

        Args:
            named: checkpoint names and whole tensors.
            version: of the weights; of an idle step that before it.
            after: the moment.
        """
        dtypes = {}
        if after == "step":
            self._stepped.add(version)
        for name, tensor in pairs_of(named):
            dtypes[name] = tensor.dtype
            facts = described(tensor)
            self.emit(MOMENTS[after](name=name, version=version, replica=name, coordinate="", **facts))
        if HEAD in dtypes:
            self._heads.add(after)
        if after == "load" and self.model:
            from verifier.model.checkpoint import open_checkpoint
            from verifier.model.families import copies_of

            source = open_checkpoint(self.model)
            copies = copies_of(source.config)
            files = {name: name for name in source.names() if name in dtypes or name not in copies}
            if HEAD in dtypes and (tied := tied_head(source)):
                files[HEAD] = tied
            for name, own in files.items():
                read = source.read(own)
                facts = described(read.to(dtypes.get(name, read.dtype)))
                self.emit(ExpectedShard(name=name, coordinate="", **facts))

    def as_sent(self, kind: type[Any], tensor: Any) -> Any:
        """A tensor that an export is compared with, rounded as `sends` tells; any other as it is."""
        if not self.sends or kind not in (SourceTensor, JoinedTensor) or not tensor.is_floating_point():
            return tensor
        import torch

        return tensor.to(getattr(torch, self.sends))

    def _record_source(self) -> None:
        from verifier.model.checkpoint import open_checkpoint

        source = open_checkpoint(self.model)
        tied = tied_head(source)
        for item in source_tensors(source, lambda tensor: self.as_sent(SourceTensor, tensor)):
            self.emit(item)
            if item.name == tied:  # a state_dict has both names
                self.emit(replace(item, name=HEAD, copy_of=item.name))

    def megatron_config(self, config: Any, chunks: Sequence[Any] = ()) -> None:
        """Fields of the TransformerConfig of a loop on megatron-core, with windows and norms of its model chunks."""
        from verifier.stages.load.probe_configs_megatron import record_provider

        record_provider(self, config, chunks)

    def adapter_merged(
        self, name: str, version: int, merged: Any, *, base: Any, a: Any, b: Any, scaling: float
    ) -> None:
        """A float32 matrix [M, N] that is exported with an adapter in it: base + scaling * b [M, R] @ a [R, N].

        Raises:
            UsageError: another dtype than float32.
        """
        if str(merged.dtype) != "torch.float32":
            raise UsageError(f"`{name}` is merged in {merged.dtype}: what that rounds has no bound here")
        gap, *_ = merge_gap(merged.detach(), base.detach().cpu(), a.detach().cpu(), b.detach().cpu(), scaling)
        self.emit(merged_matrix(name, gap, version))

    def export_saved(self, folder: Path | str, version: int, *, live: Named = ()) -> None:
        """A checkpoint that the loop has saved, beside the one that it began with and the weights of a version.

        `live` are those weights, where `weights_held` has not recorded them after their step.

        Raises:
            UsageError: `probe.open` was given no `model`.
        """
        from verifier.model.checkpoint import open_checkpoint

        folder = Path(folder)
        if not self.model:
            raise UsageError("`export_saved` compares with the checkpoint that the loop began with: give model to open")
        source = Path(self.model)
        files, tied = IndexedFiles(folder), tied_head(open_checkpoint(source))
        both = {HEAD: tied} if tied in files.names and HEAD not in files.names else {}
        record_saved(self, files, version, both if "sent" in self._heads else {})
        record_files(self, source, folder, version)
        for kind, path in ((SourceConfig, source), (ExportedConfig, folder)):
            values = json.loads((path / "config.json").read_text())
            self.emit(kind(name="config.json", version=version, values=texts_of(values)))
        if not self.has_source:
            self.has_source = True
            self._record_source()
        if version not in self._stepped:
            self.weights_held(live, version, after="step")
        names = {name: name for name in files.names} | (both if "step" in self._heads else {})
        read = ((name, files.read(own)) for name, own in names.items())
        record_tensors(self, WrittenShard, read, version, coordinate="")

    def checkpoint_saved(self, version: int, state: Mapping[str, Any], folder: Path | str | None = None) -> None:
        """State that this process holds as it saves a checkpoint, to be compared with what a resume loads.

        Args:
            version: of the weights.
            state: nested dicts and lists of tensors and values: state dicts of model, optimizer, scheduler, generators.
            folder: of the checkpoint, in which a file keeps the digests for a later process; None for state that comes
                back to this one, as from the host.
        """
        facts = list(_state(state))
        for name, fields in facts:
            self.emit(SavedState(name=name, version=version, coordinate="", **fields))
        if folder is not None:
            file = Path(folder) / f"{self.rank:04d}-{STATE_FILE}"
            file.write_text(json.dumps(facts))

    def checkpoint_loaded(self, version: int, state: Mapping[str, Any], folder: Path | str | None = None) -> None:
        """The same state after it was loaded; of a checkpoint of an earlier process `folder` has what was saved.

        Raises:
            UsageError: nobody said what was saved there.
        """
        if folder is not None:
            file = Path(folder) / f"{self.rank:04d}-{STATE_FILE}"
            if not file.exists():
                raise UsageError(f"`{file}` is not there: `checkpoint_saved` writes it where it is given the folder")
            for name, fields in json.loads(file.read_text()):
                fields["shape"] = tuple(fields["shape"])
                self.emit(SavedState(name=name, version=version, coordinate="", **fields))
        for name, fields in _state(state):
            self.emit(LoadedState(name=name, version=version, coordinate="", **fields))

    def checkpoint_written(self, version: int, given: Named, written: Named) -> None:
        """Tensors that were given to be saved, and what the files of the checkpoint have: some elements of each."""
        found, tensors = dict(pairs_of(written)), []
        for name, tensor in pairs_of(given):
            own = _elements(tensor)
            read = _elements(found[name]) if name in found and found[name].numel() == tensor.numel() else own[:0]
            tensors.append({"name": name, "given": own, "written": read})
        record_written(self, f"trainer rank {self.rank}", version, tensors)

    def engine_restarted(self, version: int, restarts: int = 1) -> None:
        """Engines were started again and answered by a version; what they hold is to be recorded as of that version."""
        self.emit(EngineRestart(name="the engines", version=version, restarts=restarts))


class EngineRecorder(StateRecorder):
    """Calls of the process of an engine rank on what it holds."""

    synced: tuple[int, dict[str, str]] | None = None
    """Version and digests of what `engine_held` recorded last."""

    def engine_held(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        buffers: Mapping[str, Any] | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        cold: bool = False,
    ) -> None:
        """Contents of the engine, under its own names, right after a sync.

        Args:
            version: of the weights.
            tensors: its parameters.
            buffers: its buffers.
            settings: of each module, numbers, flags and names that it computes with.
            cold: of a second engine, which loaded the weights at its start, and which this one is to equal.
        """
        from verifier.engine.api import EngineTensor
        from verifier.stages.engine.probe_engine_state import EngineState

        groups = (("parameter", tensors), ("buffer", buffers or {}))
        held = [
            EngineTensor(name=name, kind=kind, **described(own))
            for kind, group in groups
            for name, own in group.items()
        ]
        told = [(name, {key: str(own) for key, own in values.items()}) for name, values in (settings or {}).items()]
        kinds = (ColdTensor, ColdSettings) if cold else (SyncedTensor, SyncedSettings)
        EngineState(tensors=[held], settings=[told]).record([self], version, *kinds)
        if not cold:
            self.synced = version, {item.name: item.digest for item in held}

    def engine_served(self, tensors: Mapping[str, Any]) -> None:
        """All that `engine_held` named, parameters and buffers, as it is before the next sync.

        Raises:
            UsageError: `engine_held` was not called before.
        """
        if self.synced is None:
            raise UsageError("`engine_served` compares with what `engine_held` recorded after the sync before")
        version, before = self.synced
        now = {name: described(tensor)["digest"] for name, tensor in tensors.items()}
        changed = tuple(name for name in before | now if before.get(name) != now.get(name))
        record = EngineServed(name="the engine", version=version, num_tensors=len(now), changed=changed)
        self.emit(record)

    def engine_views(self, version: int, named: Named) -> None:
        """Whole checkpoint tensors as the engine rank holds them after a sync, read back from what it computes with."""
        for name, tensor in pairs_of(named):
            facts = described(tensor)
            box = tuple((0, size) for size in facts["shape"])
            self.emit(CheckpointView(name=name, version=version, tensor=name, holder=name, box=box, **facts))

    def engine_loaded(self, version: int, names: Iterable[str], *, chunk: int = 0, refused: str = "") -> None:
        """Parameters that the engine's own loader reported for a chunk: what vLLM's `load_weights` returns."""
        self.emit(LoadedNames(name=f"chunk {chunk}", version=version, names=tuple(sorted(names)), refused=refused))

    def engine_poisoned(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Floats of an engine after they were filled with NaN, right before a sync that is to bring them all."""
        import torch

        outcomes = {
            name: "nan" if bool(torch.isnan(tensor).all()) else "left"
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        self.emit(Poison(name=f"engine rank {self.rank}", version=version, outcomes=outcomes))

    def engine_cache(self, version: int, *, blocks: Sequence[int], tokens: Sequence[int], kept: bool = False) -> None:
        """Keys and values that each engine has right after a sync.

        Args:
            version: of the weights.
            blocks: that its prefix cache would give to new prompts.
            tokens: of running requests, whose keys it goes on from.
            kept: these were to keep theirs.
        """
        record = KeptKeys(name="keys", version=version, blocks=tuple(blocks), tokens=tuple(tokens), kept=kept)
        self.emit(record)


def _state(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, and digest, dtype and shape, of each tensor and value of a nested state."""
    from verifier.core.reader import digest_of

    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _state(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _state(item, f"{path}/{at}")
    elif hasattr(value, "untyped_storage"):
        yield path, described(whole(value))
    elif not callable(value):
        kind = type(value).__name__.lower()
        dtype = kind if kind.isidentifier() else "object"
        yield path, {"digest": digest_of(repr(value).encode()), "dtype": dtype, "shape": ()}


def _elements(tensor: Any) -> np.ndarray:
    """Bits of some elements of a tensor, spread over it, [K] int64; floats as float32."""
    flat = tensor.detach().reshape(-1)
    at = np.unique(np.linspace(0, max(flat.numel() - 1, 0), WRITTEN).astype(np.int64))[: flat.numel()]
    values = flat[at].cpu()
    if values.is_floating_point():
        bits: np.ndarray = values.float().numpy().view(np.int32).astype(np.int64)
        return bits
    return np.asarray(values.to(dtype=values.dtype).numpy(), np.int64)


def tied_head(source: Any) -> str:
    """Name of the embedding that is a checkpoint's head, too, and stands for it: a state_dict has both names."""
    is_tied = text_model(source.config).get("tie_word_embeddings") and HEAD not in source.names()
    return next((name for name in source.names() if is_tied and name.endswith("embed_tokens.weight")), "")
