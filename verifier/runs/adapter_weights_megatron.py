"""A run that trains an adapter: the base stays as it is on both sides, the adapter is what is synced, as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verifier.core.record import real
from verifier.core.records_weights import (
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    FrozenShard,
    JoinedTensor,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    Update,
    UpdatedShard,
)
from verifier.export.adapters import adapters_of
from verifier.export.save import save_checkpoint
from verifier.launch.flight_recorder import label
from verifier.model import provider_megatron
from verifier.probes.weights_megatron import LiveWeights, record_tensors, recorded
from verifier.runs.full_weights_megatron import DATA_PARALLEL, joined, record_exported
from verifier.runs.rank_run_megatron import RankRun
from verifier.train import lora_megatron, step_megatron
from verifier.train.optimizer_megatron import named_gradients


class AdapterWeights:
    """The adapter; see `FullWeights`. No weight of the base is sent: the engine loaded it."""

    idles = recording_gathers = False

    def __init__(self, run: RankRun) -> None:
        self._run = run
        self._layout = None
        if run.layout is not None:
            self._layout = adapters_of(run.layout, lora_megatron.TARGETS, run.spec.lora_rank)

    def build(self, *, training: bool) -> None:
        """Build the model, load the source, put adapters on it, and record them before any step."""
        run, spec = self._run, self._run.spec
        self.trainer = provider_megatron.build(
            spec.checkpoint, run.mesh, dtype=spec.config.dtype, tier=spec.tier, data_parallel=DATA_PARALLEL,
            deadline_s=spec.deadline_s, adapt=partial(lora_megatron.attach, rank=spec.lora_rank),
            fixes=spec.fixes,
        )  # fmt: skip
        self.live = _LivePart(self.trainer.chunks, run.layout, run.mesh, run.rank)
        self._live_adapter = _LivePart(self.trainer.chunks, self._layout, run.mesh, run.rank)
        self._live_adapter.adapters = True
        if self._layout is not None:
            matrices = joined(run, "adapter-shards-0", self._layout, self._live_adapter, self._live_adapter.tensors())
            self._hand_on("matrices-0", matrices)
            if run.rank == 0:
                record_tensors(run.probe, LiveAdapterMatrix, self._layout.spread(matrices))

    def begin(self) -> bool:
        """Export base and adapter as they are loaded."""
        self.sync(0)
        return True

    def sync(self, version: int) -> None:
        """Export base and adapter; the engine loads the adapter from a file."""
        run = self._run
        run.say(f"version {version}: export base and adapter")
        with label("export"):
            for _ in recorded(run.probe, lora_megatron.export_base(self.trainer), version):
                pass
            self._adapter = lora_megatron.export_adapter(self.trainer)
        record_exported(run, self.trainer, self.live, version)
        if version and run.rank == 0:
            path = run.work / f"adapter-{version}"
            lora_megatron.save_adapter(path, self._adapter, run.spec.lora_rank)
            found, scaling = lora_megatron.read_adapter(path)
            record_tensors(run.probe, ExportedAdapterMatrix, found.items(), version)
            run.probe.emit(ExportedAdapterScaling(name="alpha / rank", version=version, scaling=real(scaling)))
            if self._layout is None:
                self._hand_on_merged(self._adapter, version)
            if run.link.client is not None:
                run.link.client.load_adapter(path)
        dist.barrier()

    def hand_on_gradients(self, version: int) -> None:
        """Join the shards of all ranks' gradients of the adapter; a collective."""
        if self._layout is None:
            return
        named = named_gradients(self.trainer)
        matrices = joined(self._run, f"gradient-shards-{version}", self._layout, self._live_adapter, named)
        self._hand_on(f"gradients-{version}", matrices)

    def record_update(self, version: int) -> None:
        """Record base and adapter of all ranks after an update."""
        run = self._run
        with step_megatron.params_synced(self.trainer):
            self.live.record(run.probe, version, UpdatedShard, FrozenShard)
            if run.layout is None or self._layout is None:
                return
            base = joined(run, f"shards-{version}", run.layout, self.live, self.live.tensors())
            adapter = self._live_adapter
            matrices = joined(run, f"adapter-shards-{version}", self._layout, adapter, adapter.tensors())
        self._hand_on(f"matrices-{version}", matrices)
        if run.rank == 0:
            found = dict(self._layout.spread(matrices))
            record_tensors(run.probe, JoinedTensor, base.items(), version)
            record_tensors(run.probe, LiveAdapterMatrix, found.items(), version)
            scaling = real(lora_megatron.scaling_of(self.trainer))
            run.probe.emit(LiveAdapterScaling(name="alpha / rank", version=version, scaling=scaling))
            run.probe.emit(Update(name=f"adapter {version}", version=version, how="adapter step"))
            self._hand_on_merged(found, version)

    def expected_in_engine(self, version: int) -> dict[str, torch.Tensor]:
        """The source and the adapter as an engine holds it; before the first sync its place is empty."""
        source, adapter = self._run.source, lora_megatron.held_by_engine(self._adapter)
        if version == 0:
            adapter = {name: torch.zeros_like(tensor) for name, tensor in adapter.items()}
        return {**{name: source.read(name) for name in source.names()}, **adapter}

    def finish(self) -> None:
        """Nothing: the adapter's file is there already."""

    def _hand_on(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._run.rank == 0:
            save_checkpoint(self._run.work / folder, self._run.source.config, tensors.items())

    def _hand_on_merged(self, adapter: Mapping[str, torch.Tensor], version: int) -> None:
        weights: Any = lora_megatron.merged(self._run.source, adapter)
        save_checkpoint(self._run.work / f"live-{version}", self._run.source.config, weights)


class _LivePart(LiveWeights):
    """The adapters alone, or, under the names that they have without adapters, the frozen parameters alone."""

    adapters = False

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """See `LiveWeights.tensors`."""
        for chunk, name, tensor in super().tensors():
            if (".adapter." in name) is self.adapters:
                yield chunk, name if self.adapters else name.replace(".to_wrap.", "."), tensor
