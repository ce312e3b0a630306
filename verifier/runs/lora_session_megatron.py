"""The trainer's side of a run that trains an adapter: the base stays as it is, the adapter is what is synced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    LoadedShard,
    Update,
    UpdatedShard,
)
from verifier.export.adapters import adapters_of
from verifier.export.save import save_checkpoint
from verifier.launch.flight_recorder import label
from verifier.model import provider_megatron
from verifier.probes.weights_megatron import LiveWeights, join, record_source, record_tensors, recorded
from verifier.runs.scenario import NO_DECAY, RATES
from verifier.runs.session_megatron import DATA_PARALLEL, Session
from verifier.runs.steps_megatron import Steps, record_rules
from verifier.train import lora_megatron as adapter_megatron
from verifier.train import step_megatron
from verifier.train.gradients_megatron import whole_gradients


class LiveBase(LiveWeights):
    """The frozen parameters alone, under the names that they have without adapters."""

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """See `LiveWeights.tensors`."""
        for chunk, name, tensor in super().tensors():
            if ".adapter." not in name:
                yield chunk, name.replace(".to_wrap.", "."), tensor


class LiveAdapter(LiveWeights):
    """The adapters alone."""

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """See `LiveWeights.tensors`."""
        return (item for item in super().tensors() if ".adapter." in item[1])


class AdapterSession(Session):
    """See `Session`. No weight of the base is sent: both sides loaded it, and must hold it unchanged to the end."""

    def load(self, *, training: bool = True) -> None:
        """Build and load the trainer, and put adapters on it."""
        spec = self.spec
        self.say(f"loading {self.mesh.world_size} trainer ranks ({self.mesh.label()}) with adapters")
        self.trainer = provider_megatron.build(
            spec.checkpoint, self.mesh, dtype=spec.dtype, tier=spec.tier, data_parallel=DATA_PARALLEL,
            deadline_s=spec.deadline_s, adapt=partial(adapter_megatron.attach, rank=spec.lora_rank),
            fixes=spec.fixes,
        )  # fmt: skip
        self.live = LiveBase(self.trainer.chunks, self.layout, self.mesh, self.rank)
        self.adapters = self.layout and adapters_of(self.layout, adapter_megatron.TARGETS, spec.lora_rank)
        self.live_adapter = LiveAdapter(self.trainer.chunks, self.adapters, self.mesh, self.rank)
        self.live.record_expected(self.probe, self.source)
        self.live.record(self.probe, 0, LoadedShard)
        if self.rank == 0:
            record_source(self.probe, self.source)
            record_rules(self.probe, {**RATES, **NO_DECAY})
        if self.adapters is not None:
            joined = self._joined("matrices", 0, self.live_adapter.tensors())
            self._hand_on("matrices", 0, joined)
            if self.rank == 0:
                record_tensors(self.probe, LiveAdapterMatrix, self.adapters.spread(joined))

    def _dump_gradients(self, version: int) -> None:
        """Hand the adapters' reduced gradients to the oracle."""
        if self.adapters is None or not self.spec.gradients:
            return
        found = whole_gradients(self.trainer)
        named = ((chunk, name, value) for chunk, values in enumerate(found) for name, value in values.items())
        self._hand_on("gradients", version, self._joined("gradients", version, named))

    def _joined(
        self, kind: str, version: int, tensors: Iterable[tuple[int, str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """On rank 0, the adapters' tensors of all ranks by their published names, each once; a collective."""
        assert self.adapters is not None
        shards = self._folder(f"{kind}-shards-{version}")
        self.live_adapter.dump(shards, tensors)
        dist.barrier()
        return join(shards, self.adapters, self.mesh) if self.rank == 0 else {}

    def _hand_on(self, kind: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.rank == 0:
            save_checkpoint(self.work / f"{kind}-{version}", self.source.config, tensors.items())

    def sync(self, version: int) -> None:
        """Export base and adapter; the engine loads the adapter from a file."""
        self.say(f"version {version}: export base and adapter")
        with label("export"):
            for _ in recorded(self.probe, adapter_megatron.export_base(self.trainer), version):
                pass
            self.adapter = adapter_megatron.export_adapter(self.trainer)
        self.record_exported(version)
        if version and self.rank == 0:
            path = self.work / f"adapter-{version}"
            adapter_megatron.save_adapter(path, self.adapter, self.spec.lora_rank)
            found, scaling = adapter_megatron.read_adapter(path)
            record_tensors(self.probe, ExportedAdapterMatrix, found.items(), version)
            self.probe.emit(ExportedAdapterScaling(name="alpha / rank", version=version, scaling=real(scaling)))
            if self.adapters is None:
                self._hand_to_oracle(self.adapter, version)
            if self.engine is not None:
                self.engine.client.load_adapter(path)
        dist.barrier()

    def _hand_to_oracle(self, adapter: Mapping[str, torch.Tensor], version: int) -> None:
        weights: Any = adapter_megatron.merged(self.source, adapter)
        save_checkpoint(self.work / f"live-{version}", self.source.config, weights)

    def record_update(self, version: int) -> None:
        """Base and adapters of all ranks after an update, joined without Megatron-Bridge."""
        with step_megatron.params_synced(self.trainer):
            self.live.record(self.probe, version, UpdatedShard, FrozenShard)
            if self.layout is None or self.adapters is None:
                return
            shards = self._folder(f"shards-{version}")
            self.live.dump(shards, self.live.tensors())
            joined = self._joined("matrices", version, self.live_adapter.tensors())
        self._hand_on("matrices", version, joined)
        if self.rank == 0:
            record_tensors(self.probe, JoinedTensor, join(shards, self.layout, self.mesh).items(), version)
            found = dict(self.adapters.spread(joined))
            record_tensors(self.probe, LiveAdapterMatrix, found.items(), version)
            scaling = real(adapter_megatron.scaling_of(self.trainer))
            self.probe.emit(LiveAdapterScaling(name="alpha / rank", version=version, scaling=scaling))
            self.probe.emit(Update(name=f"adapter {version}", version=version, how="adapter step"))
            self._hand_to_oracle(found, version)

    def observe_engine(self, version: int) -> None:
        """Record what the engine holds, scores and samples at a version."""
        if self.engine is None:
            return
        self.say(f"version {version}: engine scores and samples")
        self.engine.record_logprobs(self.spec.scenario.sequences, version)
        self.engine.record_samples(self.spec.scenario.prompts, version, self.spec.seed + version)
        self.engine.record_draws(self.spec.scenario.prompts[0], version, self.spec.seed + version)
        base = {name: self.source.read(name) for name in self.source.names()}
        adapter = adapter_megatron.held_by_engine(self.adapter)
        if version == 0:  # none is loaded yet, and its place is empty
            adapter = {name: torch.zeros_like(tensor) for name, tensor in adapter.items()}
        self.engine.record_held({**base, **adapter}, version)

    def roundtrip(self) -> None:
        """Everything, in the order of the data flow."""
        self.load()
        self.score(0)
        self.sync(0)
        self.observe_engine(0)
        self._steps = Steps(self.trainer, {**RATES, **NO_DECAY})
        for version in range(1, self.spec.cycles + 1):
            self.update(version)
            self.record_update(version)
            self.score(version)
            self.sync(version)
            self.observe_engine(version)

    def tokens(self) -> None:
        """The token path alone: nothing is exported, no engine takes part."""
        self.load()
        self.score(0)
        self._steps = Steps(self.trainer, {**RATES, **NO_DECAY})
        for version in range(1, self.spec.cycles + 1):
            self.update(version)
            self.record_update(version)
            self.score(version)
