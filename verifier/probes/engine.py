"""Probes of an engine: every tensor that its ranks hold, and the plain values that they compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verifier.core import store
from verifier.core.evidence import Evidence, Probe
from verifier.core.stage import Stage
from verifier.engine.api import EngineTensor
from verifier.engine.client import EngineClient

Settings = Sequence[tuple[str, Mapping[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What all ranks of an engine hold at one moment, by rank."""

    tensors: Sequence[Sequence[EngineTensor]]
    settings: Sequence[Settings]

    def record(self, probes: Sequence[Probe], version: int, *, prefix: str = "") -> None:
        """One fact for each tensor and for each module with settings.

        Args:
            probes: by engine rank.
            version: of the weights.
            prefix: of the evidence's kinds: nothing, or "cold-".
        """
        kind = "cold" if prefix else "state"
        for probe, tensors, settings in zip(probes, self.tensors, self.settings, strict=True):
            for item in tensors:
                probe.emit(
                    Evidence(
                        stage=Stage.ENGINE, kind=kind, name=item.name, version=version, digest=item.digest,
                        dtype=item.dtype, shape=item.shape, facts={"kind": item.kind},
                    )
                )  # fmt: skip
            for module, values in settings:
                probe.emit(
                    Evidence(
                        stage=Stage.ENGINE, kind=f"{prefix}settings", name=module or "the model", version=version,
                        facts=dict(values),
                    )
                )  # fmt: skip

    def record_cold(self, trace: Path, version: int) -> None:
        """The same, of an engine that loaded the weights of a version cold."""
        probes = [store.Recorder(trace, "cold", rank) for rank in range(len(self.tensors))]
        self.record(probes, version, prefix="cold-")
        for probe in probes:
            probe.close()


def held_by(client: EngineClient) -> EngineState:
    """Ask an engine."""
    return EngineState(tensors=client.state(), settings=client.call("verifier.engine.settings", "read_settings", []))
