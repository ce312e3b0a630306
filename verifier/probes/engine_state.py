"""Probes of an engine: what its ranks received, hold, compute with and score; no torch but to cut what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from verifier.core import store
from verifier.core.record import Probe
from verifier.core.records_engine import (
    CheckpointView,
    ColdSettings,
    ColdTensor,
    ExpectedView,
    HeldTensorRecord,
    LoadedNames,
    Poison,
    QuantizedNames,
    ReceivedTensor,
    SyncedSettings,
    SyncedTensor,
)
from verifier.core.records_logprobs import DrawnTokens, EngineLogprobs, SampledTokens, ShapedTokens
from verifier.engine.api import EngineSlice, EngineTensor, Poisoned, Sample, Sampling
from verifier.engine.client import EngineClient

if TYPE_CHECKING:
    import torch

    from verifier.transport.wire import Receipt

Settings = Sequence[tuple[str, Mapping[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Contents of all ranks of an engine at one moment, by rank."""

    tensors: Sequence[Sequence[EngineTensor]]
    settings: Sequence[Settings]

    def record(self, probes: Sequence[Probe], version: int) -> None:
        """Record a synced engine: one fact for each tensor and for each module with settings.

        Args:
            probes: by engine rank.
            version: of the weights.
        """
        self._record(probes, version, SyncedTensor, SyncedSettings)

    def record_cold(self, trace: Path, version: int) -> None:
        """Record an engine that loaded the weights of a version at its start."""
        probes = [store.Recorder(trace, "cold", rank) for rank in range(len(self.tensors))]
        self._record(probes, version, ColdTensor, ColdSettings)
        for probe in probes:
            probe.close()

    def _record(
        self,
        probes: Sequence[Probe],
        version: int,
        tensor: type[HeldTensorRecord],
        module: type[SyncedSettings | ColdSettings],
    ) -> None:
        for probe, tensors, settings in zip(probes, self.tensors, self.settings, strict=True):
            for item in tensors:
                probe.emit(
                    tensor(
                        name=item.name, version=version, digest=item.digest, dtype=item.dtype, shape=tuple(item.shape),
                        sort=cast(Any, item.kind),
                    )
                )  # fmt: skip
            for name, values in settings:
                probe.emit(module(name=name or "the model", version=version, values=dict(values)))


def held_by(client: EngineClient) -> EngineState:
    """Ask an engine."""
    return EngineState(tensors=client.state(), settings=client.call("verifier.engine.settings:read_settings"))


def record_poison(probe: Probe, rank: int, outcomes: Sequence[Poisoned], version: int) -> None:
    """Record the effect of the poison on each tensor of one engine rank."""
    found = {item.name: item.how for item in outcomes}
    probe.emit(Poison(name=f"engine rank {rank}", version=version, outcomes=found))


def record_receipt(probe: Probe, receipt: Receipt, version: int) -> None:
    """Record what one engine rank received in one chunk, and what its loader reported."""
    for item in receipt.received:
        probe.emit(
            ReceivedTensor(
                name=item.name, version=version, digest=item.digest, dtype=item.dtype, shape=tuple(item.shape),
                chunk=receipt.chunk,
            )
        )  # fmt: skip
    names, refused = tuple(receipt.loaded), receipt.refused or ""
    probe.emit(LoadedNames(name=f"chunk {receipt.chunk}", version=version, names=names, refused=refused))


def record_views(probe: Probe, slices: Sequence[EngineSlice], sent: Mapping[str, torch.Tensor], version: int) -> None:
    """The checkpoint slices that one engine rank holds, beside what was sent, cut to them.

    Args:
        probe: of that engine rank.
        slices: what it holds.
        sent: what it should hold, whole, by name.
        version: of the weights.
    """
    seen = {item.name for item in slices if item.quantized}
    if seen:
        probe.emit(QuantizedNames(name="quantized by the engine", version=version, names=tuple(sorted(seen))))
    for item in slices:
        if item.quantized:
            continue
        name = f"{item.name} in {item.holder}" if item.name in seen else item.name
        seen.add(item.name)
        box = tuple((int(begin), int(end)) for begin, end in item.box)
        probe.emit(
            CheckpointView(
                name=name, version=version, digest=item.digest, dtype=item.dtype, shape=tuple(item.shape),
                tensor=item.name, holder=item.holder, box=box,
            )
        )  # fmt: skip
        if item.name in sent:
            _record_expected_view(probe, name, sent[item.name], box, version)
    for name in sent.keys() - seen:
        _record_expected_view(probe, name, sent[name], (), version)


def _record_expected_view(
    probe: Probe, name: str, tensor: torch.Tensor, box: Sequence[tuple[int, int]], version: int
) -> None:
    from verifier.plan.digest import digest_tensor
    from verifier.transport.buffer import dtype_name

    whole = tuple(tensor.shape)
    for dim, (begin, end) in enumerate(box):
        tensor = tensor.narrow(dim, begin, end - begin)
    probe.emit(
        ExpectedView(
            name=name, version=version, digest=digest_tensor(tensor), dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape), whole=whole,
        )
    )  # fmt: skip


def record_scored(probe: Probe, name: str, rows: Sequence[Sequence[float]], version: int) -> None:
    """Teacher-forced log-probabilities by the engine, one row a sequence, nats."""
    lengths = tuple(len(row) for row in rows)
    probe.emit(EngineLogprobs(name=name, version=version, lengths=lengths), _flat(rows))


def record_sampled(
    probe: Probe,
    name: str,
    rows: Sequence[tuple[Sequence[int], Sampling, Sample]],
    version: int,
    *,
    shaped: bool = False,
) -> None:
    """Record tokens that the engine sampled.

    Args:
        probe: of engine rank 0.
        name: of the set of requests.
        rows: each sample's prompt, its request and itself.
        version: of the weights.
        shaped: the requests ask for penalties, biases or truncation.
    """
    samples = [sample for _, _, sample in rows]
    record = SampledTokens(
        name=name, version=version, lengths=tuple(len(sample.tokens) for sample in samples),
        prompts=tuple(tuple(prompt) for prompt, _, _ in rows), tokens=tuple(tuple(sample.tokens) for sample in samples),
        cached=tuple(sample.cached_tokens for sample in samples),
        stops=tuple(tuple(asked.stop) for _, asked, _ in rows), limits=tuple(asked.max_tokens for _, asked, _ in rows),
        temperatures=tuple(float(asked.temperature) for _, asked, _ in rows),
    )  # fmt: skip
    values = _flat([sample.logprobs for sample in samples])
    if not shaped:
        probe.emit(record, values)
        return
    asked = tuple(asdict(request) for _, request, _ in rows)
    probe.emit(ShapedTokens(**msgspec.structs.asdict(record), asked=asked), values)


def record_drawn(
    probe: Probe, name: str, prompt: Sequence[int], samples: Sequence[Sample], temperature: float, version: int
) -> None:
    """Many samples of the one token after a prompt."""
    tokens = tuple(sample.tokens[0] for sample in samples)
    record = DrawnTokens(name=name, version=version, prompt=tuple(prompt), tokens=tokens, temperature=temperature)
    probe.emit(record, _flat([sample.logprobs for sample in samples]))


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """[sum of lengths] float32."""
    return np.array([value for row in rows for value in row], dtype=np.float32)
