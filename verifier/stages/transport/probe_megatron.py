"""Evidence of a transfer of weights, or of an adapter, on one rank: what was sent, what arrived, what engines hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verifier.core.store import Recorder
from verifier.export.live_weights import LiveWeights
from verifier.megatron import lora_megatron
from verifier.model.families import served
from verifier.stages.engine.probe_engine_state import EvidenceBefore, HeldEngine, TransferProbe, record_views
from verifier.stages.engine.records import KeptKeys
from verifier.stages.export.probe_live_weights_megatron import cut
from verifier.stages.export.probe_tensors import merged_matrix, recorded
from verifier.stages.load.probe_configs_megatron import record_exported_adapter, record_plan
from verifier.stages.transport.records import Handover
from verifier.trainer.merge_rounding import MergeGap
from verifier.trainer.observer import RankParts, Stream, Transfer

if TYPE_CHECKING:
    from verifier.probes.training.rank_evidence_megatron import RankEvidence

KEPT_KEYS = "verifier.engine.kv_cache:kept_keys"


def held_adapter(parts: RankParts, adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that an engine has to hold: the base as it was loaded, and the adapter, scaled."""
    assert parts.adapters is not None
    base = {name: parts.source.read(name) for name in parts.source.names()}
    return base | lora_megatron.held_by_engine(adapter, parts.adapters.lora.scaling)


class TransferEvidence(TransferProbe):
    """Evidence of one transfer of weights; or of an adapter, which has no plan.

    Args:
        rank: observer of the rank.
        transfer: the transfer.
        probe: this rank's recorder of the trace; None records nothing.
        held: what the engines held after the last one; rank 0's alone.
        done: called at the end.
        live: weights of this rank, which an export of weights is compared with; None where it is not.
    """

    def __init__(
        self, rank: RankEvidence, transfer: Transfer, probe: Recorder | None, held: HeldEngine | None,
        done: Callable[[], None], live: LiveWeights | None = None,
    ) -> None:  # fmt: skip
        self._rank, self._transfer, self._probe, self._held, self._done = rank, transfer, probe, held, done
        self._live = live
        super().__init__((), transfer.version, keeps=probe is not None)
        self._open = contextlib.ExitStack()
        trace = None if probe is None else str(probe.path)
        self._before = EvidenceBefore(trace if rank.parts.rank == 0 else None, transfer.num_ranks)
        self._adapter: Mapping[str, torch.Tensor] = {}

    def __enter__(self) -> TransferEvidence:
        if self._probe is not None and self._transfer.client is not None:
            with contextlib.ExitStack() as stack:
                recorders = [Recorder(self._probe.path, "engine", at) for at in range(self._transfer.num_ranks)]
                self._ranks = [stack.enter_context(contextlib.closing(item)) for item in recorders]
                if self._held is not None and not self._transfer.first:
                    self._held.record_served(self._ranks, self.version - 1)
                self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._done()

    def on_adapter(self, path: Path, adapter: Mapping[str, torch.Tensor]) -> None:
        """Record what a reader finds in the adapter's folder, and what ranks hold after the export."""
        self._adapter = adapter
        if self._probe is None or self._transfer.again:
            return
        if self._rank.parts.rank == 0:
            record_exported_adapter(self._probe, path, self.version)
        self._record_shards(self._probe)

    def exported(self, stream: Stream) -> Stream:
        """The export stream, digested; each live shard is cut from it where it has to be compared."""
        probe, rank = self._probe, self._rank
        if probe is None or self._transfer.again:
            yield from stream
            return
        assert self._transfer.plan is not None
        if rank.planned != probe.path:
            for item in rank.expected:
                probe.emit(item)
            record_plan(probe, self._transfer.plan, entries=rank.parts.rank == 0)
        rank.planned = probe.path
        found = recorded(probe, stream, self.version)
        known = rank.resumed or not self._transfer.first
        yield from cut(probe, self._live, found, self.version) if self._live is not None and known else found

    def on_merge(self, name: str, gap: MergeGap) -> None:
        """Record the rounding of a merged matrix."""
        if self._probe is not None and not self._transfer.again:
            self._probe.emit(merged_matrix(name, gap, self.version))

    def on_sent(self, refused: str) -> None:
        """Record what ranks hold after the export, what engines hold, and which keys of requests they kept."""
        probe, client, of_weights = self._probe, self._transfer.client, self._transfer.plan is not None
        if probe is not None and of_weights:
            self._record_shards(probe)
        if self._held is not None:
            self._held.synced(self.version, self._ranks)
        if client is None or probe is None:
            return
        parts = self._rank.parts
        sent = served(self.sent, parts.source.config) if of_weights else held_adapter(parts, self._adapter)
        for recorder, slices in zip(self._ranks, client.checkpoint_view(), strict=True):
            record_views(recorder, slices, sent, self.version)
        if of_weights and not refused:
            blocks, tokens = zip(*client.call_driver(KEPT_KEYS), strict=True)
            self._ranks[0].emit(
                KeptKeys(
                    name="keys after a sync", version=self.version, blocks=blocks, tokens=tokens,
                    kept=self._transfer.running == "kept",
                )
            )  # fmt: skip
        what = f"{'transfer' if of_weights else 'adapter'} of version {self.version}"
        probe.emit(Handover(name=what, version=self.version, refused=refused))

    def on_lost(self) -> None:
        """Remove what was recorded of engines that died meanwhile."""
        self._before.restore()

    def _record_shards(self, probe: Recorder) -> None:
        if self._rank.adapters is not None and not self._transfer.again and not self._transfer.first:
            self._rank.adapters.record_exported(probe, self.version)
