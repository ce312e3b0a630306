"""Weight sync of a training run, on one rank: export, chunk plan, and verified transfer; or an adapter as a file."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verifier.config.lora import LoraOptions
from verifier.engine import sender
from verifier.engine.client import EngineClient, EngineGone
from verifier.engine.link_megatron import EngineLink
from verifier.errors import ContractError
from verifier.export import gather_megatron
from verifier.export.live_weights import LiveWeights
from verifier.export.names import adapters_of, in_adapter, in_base, layout_of
from verifier.launch.flight_recorder import label
from verifier.megatron import lora_megatron
from verifier.megatron.lora_megatron import LoraSpec
from verifier.megatron.step_megatron import params_synced
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.plan.chunk_plan import MAX_CHUNK_BYTES, ChunkPlan, chunk_bytes_of, plan_of
from verifier.platform.gather_json import agree
from verifier.trainer.merge_rounding import MergeRounding
from verifier.trainer.observer import Note, RankObserver, Stream, Transfer, TransferObserver

if TYPE_CHECKING:
    from verifier.config.sampling import SamplingOptions


class WeightSync:
    """Link of one rank to the engines, by which they get each version. Every method is a collective.

    Weights travel by a chunk plan, into an engine that is poisoned and began with `source`; of a model with `adapters`
    they are added to the base. An engine that keeps the base is `given_adapters` alone, each a file that has its
    version's name; requests keep theirs. `run` is the folder that all nodes see.

    Attributes:
        facts: metrics of the last sync.
        before_caches: see `EngineLink.transfer`.
        lost: why the engine's process is gone; empty if it is not.
    """

    def __init__(
        self, trainer: TrainerModel, source: Checkpoint, rank: int, adapters: Adapters | None, observer: RankObserver,
        run: Path, *, given_adapters: bool,
    ) -> None:  # fmt: skip
        self._trainer, self._source, self._rank, self._adapters = trainer, source, rank, adapters
        self._observer, self._run, self._folder = observer, run, run / "adapters"
        self._given = adapters if given_adapters else None
        self.facts: Mapping[str, float] = {}
        self.before_caches: Callable[[], None] = lambda: None
        self.lost = ""
        self._link = EngineLink()
        self._plan: ChunkPlan | None = None
        self._open = contextlib.ExitStack()

    def connect(self, sockets: Sequence[str], options: SamplingOptions, transport: str, deadline_s: float) -> None:
        """Connect to the engines, in the place of those before them, and derive the chunk plan from an export.

        The death of one leaves `lost`, so that the other ranks do not wait for this one.

        Raises:
            ContractError: the ranks hold different plans, so nothing is sent.
        """
        self._open.close()
        self._link, self.lost = EngineLink.of(transport, options.sleep_level), ""
        self._num_ranks = options.ranks * options.replicas
        met = partial(self._observer.on_connect, sleeps=bool(options.sleep_level))
        if self._rank:
            met(None)
        else:
            try:
                if self._given is None:
                    told = (self._num_ranks, transport, deadline_s, met)
                    self._link.connect(self._open, sockets, *told, shared=self._run)
                else:
                    client = self._link.client = EngineClient(sockets[0], deadline_s)
                    self._open.callback(client.close)
                    met(client)
            except EngineGone as problem:
                self.lost = str(problem)
        if self._given is None:
            chunk_bytes = chunk_bytes_of(self._source.num_bytes, MAX_CHUNK_BYTES)
            self._plan = plan_of(gather_megatron.export(self._trainer), chunk_bytes)
            if not agree(self._plan.digest):
                raise ContractError("the ranks hold different chunk plans: nothing is sent")

    def sync(
        self, version: int, note: Note | None, running: sender.Running = "none", *, again: bool = False,
        first: bool = False,
    ) -> str:  # fmt: skip
        """Have the engines sample by a version from now on.

        `running` says what becomes of the keys and values of requests meanwhile, `again` that the engine died in this
        sync before, and `first` that these weights sample the step of the note, and were not made by it. Returns on
        rank 0 why the engine refused the transfer; empty if it did not, or died: see `lost`.
        """
        self.facts, path = {}, self._folder / f"version-{version:06d}"
        transfer = Transfer(
            version=version, note=note, client=self._link.client, num_ranks=self._num_ranks, plan=self._plan,
            running=running, again=again, first=first,
        )  # fmt: skip
        watch = self._observer.on_transfer(transfer)
        stream: Stream = iter(())
        if self._given is None:
            stream = watch.exported(self._stream(watch))
        else:
            with label("export of the adapter"):
                watch.on_adapter(path, self._given.save(path))
        with watch:
            try:
                refused = self._give(path) if self._plan is None else self._send(self._plan, stream, watch, running)
                watch.on_sent(refused)
                return refused
            except EngineGone as problem:
                self.lost = str(problem)
                for _ in stream:  # the other ranks draw it whole, and it is not recorded again
                    pass
        watch.on_lost()
        return ""

    def _send(self, plan: ChunkPlan, stream: Stream, watch: TransferObserver, running: sender.Running) -> str:
        began, link = time.monotonic(), self._link
        link.transfer(plan, stream, watch, running, self.before_caches)
        if not link.refused:
            sent = sum(sum(chunk.sizes) for chunk in plan.chunks)
            self.facts = {**self.facts, "sent_gb": sent / 1e9, "transfer_s": time.monotonic() - began}
        return link.refused

    def _give(self, path: Path) -> str:
        """Have the engine load an adapter, whose files replace those of versions before it."""
        if self._link.client is None:
            return ""
        try:
            self._link.client.load_adapter(path)
        except ContractError as problem:
            return str(problem)
        for other in self._folder.glob("version-*"):
            if other != path:
                shutil.rmtree(other)
        return ""

    def rest(self, level: int | None = None) -> None:
        """Let the engine sleep while the trainer steps, if it was started so; see `EngineLink.rest`."""
        self._link.rest(level)

    def wake(self) -> None:
        """Wake an engine that kept its weights on the host."""
        self._link.wake()

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


def spec_of(options: LoraOptions) -> LoraSpec | None:
    """Adapters that a config asks for; None for none."""
    if options.rank is None:
        return None
    return LoraSpec(options.rank, options.effective_alpha, options.targets)


def joined(
    live: LiveWeights, tensors: Iterable[tuple[int, str, torch.Tensor]], folder: Path, rank: int,
    *, gradients: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """On rank 0, tensors of all ranks by checkpoint name, joined by the layout without Megatron-Bridge. A collective.

    Rank 0 has to draw them before any of them changes, and before its next collective. `tensors` are (chunk, local
    name, contents). Shards lie in `folder`, the same for all ranks, which rank 0 removes when it has read all. For
    `gradients` see `LiveWeights.join`.
    """
    if live.owns_all:
        if rank == 0:
            return live.join_own(tensors, gradients=gradients)
        for _ in tensors:  # a part in what is gathered
            pass
        return iter(())
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    live.dump(folder, tensors)
    dist.barrier()
    return _read(live, folder, gradients=gradients) if rank == 0 else iter(())


def _read(live: LiveWeights, folder: Path, *, gradients: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from live.join(folder, gradients=gradients)
    shutil.rmtree(folder)


class Adapters:
    """The two parts of a model with adapters. Methods are collectives.

    `folder` is the same for all ranks.

    Attributes:
        lora: what was attached.
        base: tensors that no step changes, under the names that they have without adapters.
        trained: matrices of the adapters.
    """

    def __init__(self, trainer: TrainerModel, source: Checkpoint, lora: LoraSpec, rank: int, folder: Path) -> None:
        base, mesh = layout_of(source.config), trainer.mesh
        self.lora, self._trainer, self._rank, self._folder = lora, trainer, rank, folder
        self._layout = None if base is None else adapters_of(base, lora.targets, lora.rank)
        self.base = LiveWeights(trainer.chunks, base, mesh, rank, in_base)
        self.trained = LiveWeights(trainer.chunks, self._layout, mesh, rank, in_adapter)

    def names(self) -> Mapping[str, Sequence[str]]:
        """Each joined A -> all of its published names; none of a family without a layout."""
        return {} if self._layout is None else self._layout.names()

    def published(self, matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Joined matrices under each of their published names; none of a family without a layout."""
        return {} if self._layout is None else dict(self._layout.spread(matrices))

    def matrices(self) -> dict[str, torch.Tensor]:
        """On rank 0, the live matrices under each of their published names, joined by the layout."""
        with params_synced(self._trainer):
            found = joined(self.trained, self.trained.tensors(), self._folder / "shards", self._rank)
            return self.published({name: tensor.cpu() for name, tensor in found})

    def export(self) -> dict[str, torch.Tensor]:
        """Matrices by published name, as megatron-bridge exports them."""
        return lora_megatron.export_adapter(self._trainer)

    def save(self, path: Path) -> dict[str, torch.Tensor]:
        """Export the adapter by megatron-bridge and write it, on rank 0, in the format of the peft library.

        The folder is replaced if it exists. Returns the matrices by published name, as they were exported.
        """
        adapter = self.export()
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            lora_megatron.save_adapter(path, adapter, self.lora)
        return adapter
