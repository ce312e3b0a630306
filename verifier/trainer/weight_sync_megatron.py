"""Weight sync of a training run, on one rank: export, chunk plan, verified transfer to the engine, and its evidence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verifier.core.record import Probe, Record
from verifier.core.records_weights import Handover, KeptKeys, SourceTensor
from verifier.core.store import Recorder
from verifier.engine import sender
from verifier.engine.client import EngineGone
from verifier.engine.replicas import clients_of
from verifier.errors import ContractError
from verifier.export import gather_megatron
from verifier.launch.flight_recorder import label
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.plan.chunk_plan import MAX_CHUNK_BYTES, chunk_bytes_of
from verifier.probes.engine_state import TransferProbe, record_views
from verifier.probes.exported_shards_megatron import cut
from verifier.probes.weights_megatron import LiveWeights, plan_of, record_plan, recorded, source_tensors
from verifier.runs.rank_run_megatron import EngineLink
from verifier.train.step_megatron import device_of
from verifier.trainer.engine_evidence import EvidenceBefore, HeldEngine, record_held
from verifier.trainer.merge_rounding import MergeRounding

if TYPE_CHECKING:
    from verifier.config.sampling import SamplingOptions
    from verifier.trainer.adapters_megatron import Adapters


KEPT_KEYS = "verifier.engine.kv_cache:kept_keys"


class WeightSync:
    """Link of one rank to the engine, and the plan by which weights travel. Every method is a collective.

    Args:
        trainer: whose weights are sent.
        source: checkpoint that the engine began with.
        rank: this one; rank 0 talks to the engine.
        adapters: of the trainer, which an export adds to the base; None for a trainer without.
        live: weights of this rank; None for a trainer with adapters, or without a layout.
        resumed: the ranks loaded a checkpoint of the run, and the first trace has what they held then.
        judged: what engines hold is recorded, after each sync and, if they stay awake, before the next.

    Attributes:
        facts: metrics of the last sync.
        before_caches: see `EngineLink.transfer`.
        lost: why the engine's process is gone; empty if it is not.
    """

    def __init__(
        self, trainer: TrainerModel, source: Checkpoint, rank: int, adapters: Adapters | None = None,
        live: LiveWeights | None = None, *, resumed: bool = False, judged: bool = False,
    ) -> None:  # fmt: skip
        self._trainer, self._source, self._rank, self._adapters = trainer, source, rank, adapters
        self._live, self._resumed, self._judged = live, resumed, judged
        self._held: HeldEngine | None = None
        self.facts: Mapping[str, float] = {}
        self.before_caches: Callable[[], None] = lambda: None
        self.lost = ""
        self._link = EngineLink()
        self._open = contextlib.ExitStack()
        self._expected: list[SourceTensor] = []
        self._planned: Path | None = None

    def connect(self, sockets: Sequence[str], options: SamplingOptions, transport: str, deadline_s: float) -> None:
        """Connect to the engines, in the place of those before them, and derive the chunk plan from an export.

        The death of one leaves `lost`, so that the other ranks do not wait for this one.

        Raises:
            ContractError: the ranks hold different plans, so nothing is sent.
        """
        self.close()
        self._link, self.lost = EngineLink(), ""
        link, self._num_ranks = self._link, options.tp * options.replicas
        link.sleep_level = options.sleep_level
        if transport == "ipc":
            from verifier.transport.cuda_ipc import TrainerRounds

            link.rounds = TrainerRounds()
        if self._rank == 0:
            try:
                self._meet(sockets, transport, deadline_s)
            except EngineGone as problem:
                self.lost = str(problem)
            self._expected = list(source_tensors(self._source))
        chunk_bytes = chunk_bytes_of(self._source.num_bytes, MAX_CHUNK_BYTES)
        self._plan = plan_of(gather_megatron.export(self._trainer), chunk_bytes)
        number = torch.tensor(int(self._plan.digest.partition(":")[2][:15], 16), device=device_of(self._trainer))
        greatest, least = number.clone(), number.clone()
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        if int(greatest) != int(least):
            raise ContractError("the ranks hold different chunk plans: nothing is sent")

    def _meet(self, sockets: Sequence[str], transport: str, deadline_s: float) -> None:
        """Connect rank 0 to the engines."""
        from verifier.transport.gloo import Listener

        link, client = self._link, clients_of(sockets, deadline_s)
        link.client = self._open.enter_context(contextlib.closing(client))
        self._held = HeldEngine(client, sleeps=bool(link.sleep_level)) if self._judged else None
        listener = Listener(self._num_ranks, deadline_s=deadline_s, kind=transport, folder=Path(sockets[0]).parent)
        link.group = self._open.enter_context(contextlib.closing(sender.connect(client, listener, link.rounds)))

    def sync(
        self, version: int, trace: str | None, probe: Recorder | None, running: sender.Running = "none", *,
        again: bool = False, first: bool = False,
    ) -> str:  # fmt: skip
        """Poison all that the engine holds, send every weight, and record what arrived.

        Args:
            version: of the weights.
            trace: trace directory; None records nothing.
            probe: this rank's recorder of the trace.
            running: requests of the engine meanwhile, and what becomes of their keys and values.
            again: the engine died in this sync before, whose export is recorded.
            first: the trace has no shards of these weights, and will have another sync.

        Returns:
            On rank 0, why the engine refused the transfer; empty if it did not, or died: see `lost`.
        """
        self.facts, recorder = {}, None if again else probe
        stream, before = self._stream(recorder, version, first=first), EvidenceBefore(trace, self._num_ranks)
        try:
            return self._sent(stream, version, trace, probe, running, shards=not again and not first, first=first)
        except EngineGone as problem:
            self.lost = str(problem)
            for _ in stream:  # the other ranks draw it whole
                pass
        if self._rank == 0:
            before.restore()
        return ""

    def look(self, version: int, trace: Path) -> None:
        """Record what the engines hold, beside the weights, which are those of a version."""
        sent = {name: tensor.cpu().clone() for name, tensor in self._stream(None, version) if self._rank == 0}
        if self._link.client is None:
            return
        try:
            record_held(trace, self._link.client.checkpoint_view(), sent, version)
        except EngineGone as problem:
            self.lost = str(problem)

    def _sent(
        self, stream: Iterator[tuple[str, torch.Tensor]], version: int, trace: str | None, probe: Recorder | None,
        running: sender.Running, *, shards: bool, first: bool,
    ) -> str:  # fmt: skip
        """Send a stream, and record what arrived, and what adapters and base hold afterwards; see `sync`."""
        link = self._link
        with contextlib.ExitStack() as stack:
            ranks: list[Probe] = [_NoProbe() for _ in range(self._num_ranks)]
            if trace is not None and self._rank == 0:
                closing = [contextlib.closing(Recorder(Path(trace), "engine", at)) for at in range(self._num_ranks)]
                ranks = [stack.enter_context(recorder) for recorder in closing]
            watch = TransferProbe(ranks, version, keeps=probe is not None)
            if self._held is not None and probe is not None and not first:
                self._held.record_served(ranks, version - 1)
            began = time.monotonic()
            link.transfer(self._plan, stream, watch, running, self.before_caches)
            if not link.refused:
                sent = sum(sum(chunk.sizes) for chunk in self._plan.chunks)
                self.facts = {**self.facts, "sent_gb": sent / 1e9, "transfer_s": time.monotonic() - began}
            if self._adapters is not None and probe is not None and shards:
                self._adapters.record_exported(probe, version)
            if self._held is not None:
                self._held.synced(version, ranks if probe is not None else ())
            if link.client is None or probe is None:
                return link.refused
            for at, slices in enumerate(link.client.checkpoint_view()):
                record_views(ranks[at], slices, watch.sent, version)
            if not link.refused:
                blocks, tokens = zip(*link.client.call_driver(KEPT_KEYS), strict=True)
                ranks[0].emit(
                    KeptKeys(
                        name="keys after a sync", version=version, blocks=blocks, tokens=tokens, kept=running == "kept"
                    )
                )  # fmt: skip
            probe.emit(Handover(name=f"transfer of version {version}", version=version, refused=link.refused))
        return link.refused

    def rest(self, level: int | None = None) -> None:
        """Let the engine sleep while the trainer steps, if it was started so; see `EngineLink.rest`."""
        self._link.rest(level)

    def wake(self) -> None:
        """Wake an engine that kept its weights on the host."""
        self._link.wake()

    def close(self) -> None:
        """Leave the transfer group."""
        self._open.close()

    def _stream(
        self, probe: Recorder | None, version: int, *, first: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        with label("export"):
            stream = gather_megatron.export(self._trainer)
            if self._adapters is not None:
                stream = self._measured(stream, self._adapters, probe, version)
            if probe is None:
                yield from stream
                return
            if self._planned != probe.path:
                for item in self._expected:
                    probe.emit(item)
                record_plan(probe, self._plan, entries=self._rank == 0)
            self._planned = probe.path
            stream = recorded(probe, stream, version)
            known = self._resumed or not first
            yield from cut(probe, self._live, stream, version) if self._live is not None and known else stream

    def _measured(
        self, stream: Iterator[tuple[str, torch.Tensor]], adapters: Adapters, probe: Recorder | None, version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The export stream; rank 0 measures what adding the adapters to matrices of the weights' type rounds away."""
        rounding = MergeRounding(self._source, adapters.matrices(), adapters.lora)
        for name, tensor in stream:
            if self._rank == 0 and (record := rounding.add(name, tensor, version)) is not None and probe is not None:
                probe.emit(record)
            yield name, tensor
        self.facts = {**self.facts, "merge_rounding": rounding.share()}


class _NoProbe:
    """A probe that nobody reads."""

    def emit(self, record: Record, array: object = None) -> None:
        pass
