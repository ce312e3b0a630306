"""Weight sync of a training run, on one rank: export, chunk plan, and verified transfer to the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verifier.engine import sender
from verifier.engine.client import EngineGone
from verifier.engine.link_megatron import EngineLink
from verifier.engine.replicas import clients_of
from verifier.errors import ContractError
from verifier.export import gather_megatron
from verifier.launch.flight_recorder import label
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.plan.chunk_plan import MAX_CHUNK_BYTES, chunk_bytes_of, plan_of
from verifier.train.step_megatron import device_of
from verifier.trainer.merge_rounding import MergeRounding
from verifier.trainer.observer import Note, RankObserver, Stream, Transfer, TransferObserver

if TYPE_CHECKING:
    from verifier.config.sampling import SamplingOptions
    from verifier.trainer.adapters_megatron import Adapters


class WeightSync:
    """Link of one rank to the engine, and the plan by which weights travel. Every method is a collective.

    Args:
        trainer: whose weights are sent.
        source: checkpoint that the engine began with.
        rank: this one; rank 0 talks to the engine.
        adapters: of the trainer, which an export adds to the base; None for a trainer without.
        observer: told of engines and transfers.

    Attributes:
        facts: metrics of the last sync.
        before_caches: see `EngineLink.transfer`.
        lost: why the engine's process is gone; empty if it is not.
    """

    def __init__(
        self, trainer: TrainerModel, source: Checkpoint, rank: int, adapters: Adapters | None, observer: RankObserver
    ) -> None:
        self._trainer, self._source, self._rank, self._adapters = trainer, source, rank, adapters
        self._observer = observer
        self.facts: Mapping[str, float] = {}
        self.before_caches: Callable[[], None] = lambda: None
        self.lost = ""
        self._link = EngineLink()
        self._open = contextlib.ExitStack()

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
        else:
            self._observer.on_connect(None, sleeps=bool(link.sleep_level))
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
        self._observer.on_connect(client, sleeps=bool(link.sleep_level))
        listener = Listener(self._num_ranks, deadline_s=deadline_s, kind=transport, folder=Path(sockets[0]).parent)
        link.group = self._open.enter_context(contextlib.closing(sender.connect(client, listener, link.rounds)))

    def sync(
        self, version: int, note: Note | None, running: sender.Running = "none", *, again: bool = False,
        first: bool = False,
    ) -> str:  # fmt: skip
        """Poison all that the engine holds, and send every weight.

        Args:
            version: of the weights.
            note: for the observer.
            running: requests of the engine meanwhile, and what becomes of their keys and values.
            again: the engine died in this sync before.
            first: these weights sample the step of the note, and were not made by it.

        Returns:
            On rank 0, why the engine refused the transfer; empty if it did not, or died: see `lost`.
        """
        self.facts, link = {}, self._link
        transfer = Transfer(
            version=version, note=note, client=link.client, num_ranks=self._num_ranks, plan=self._plan,
            running=running, again=again, first=first,
        )  # fmt: skip
        watch = self._observer.on_transfer(transfer)
        stream = watch.exported(self._stream(watch))
        try:
            with watch:
                self._send(stream, watch, running)
                watch.on_sent(link.refused)
                return link.refused
        except EngineGone as problem:
            self.lost = str(problem)
            for _ in stream:  # the other ranks draw it whole
                pass
        watch.on_lost()
        return ""

    def _send(self, stream: Stream, watch: TransferObserver, running: sender.Running) -> None:
        began, link = time.monotonic(), self._link
        link.transfer(self._plan, stream, watch, running, self.before_caches)
        if not link.refused:
            sent = sum(sum(chunk.sizes) for chunk in self._plan.chunks)
            self.facts = {**self.facts, "sent_gb": sent / 1e9, "transfer_s": time.monotonic() - began}

    def rest(self, level: int | None = None) -> None:
        """Let the engine sleep while the trainer steps, if it was started so; see `EngineLink.rest`."""
        self._link.rest(level)

    def wake(self) -> None:
        """Wake an engine that kept its weights on the host."""
        self._link.wake()

    def close(self) -> None:
        """Leave the transfer group."""
        self._open.close()

    def _stream(self, watch: TransferObserver) -> Stream:
        """The export; of adapters, rank 0 measures what adding them to matrices of the weights' type rounds away."""
        with label("export"):
            stream, adapters = gather_megatron.export(self._trainer), self._adapters
            if adapters is None:
                yield from stream
                return
            rounding = MergeRounding(self._source, adapters.matrices(), adapters.lora)
            for name, tensor in stream:
                if self._rank == 0 and (gap := rounding.add(name, tensor)) is not None:
                    watch.on_merge(name, gap)
                yield name, tensor
            self.facts = {**self.facts, "merge_rounding": rounding.share()}
