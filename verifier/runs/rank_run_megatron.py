"""Context of a session on one rank: spec, place in the mesh, recorder, source checkpoint, link to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.core.record import Role
from verifier.core.store import Recorder
from verifier.engine import sender
from verifier.engine.client import EngineClient
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout, layout_of
from verifier.mesh import Mesh
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.plan.chunk_plan import ChunkPlan
from verifier.probes.engine_state import TransferProbe
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    import torch

    from verifier.launch.rank import RankContext
    from verifier.transport.cuda_ipc import TrainerRounds
    from verifier.transport.group import TransferGroup


@dataclass(kw_only=True)
class EngineLink:
    """Link of one rank to the engine, if any: rank 0 talks to it, and by CUDA IPC every rank shows it a buffer."""

    client: EngineClient | None = None
    """A connection of its own; rank 0's only."""
    group: TransferGroup | None = None
    """Transfer group that the engine has joined; rank 0's only."""
    rounds: TrainerRounds | None = None
    """Rounds in which buffers are shown to the engine; every rank's, by CUDA IPC only."""
    ranks: Sequence[Recorder] = ()
    """A recorder for each engine rank; rank 0's only."""
    refused: str = ""
    """Why the last transfer was refused: layers whose weights never came are left open, and cannot score."""
    sleep_level: int = 0
    """Level at which the engine sleeps while the trainer steps; 0: never."""
    asleep: EngineClient | None = None
    """The client of an engine that sleeps."""

    def rest(self, level: int | None = None) -> None:
        """Have the engine give up its GPU memory until the next transfer, or `wake`. A collective.

        The engine counts the memory that it frees, so no rank takes any meanwhile.

        Args:
            level: by default `sleep_level`.
        """
        if self.sleep_level:
            if self.client is not None:
                self.client.sleep(self.sleep_level if level is None else level)
                self.asleep = self.client
            dist.barrier()

    def wake(self) -> None:
        """Wake an engine that kept its weights on the host."""
        sleeper, self.asleep = self.asleep, None
        for tag in ("weights", "kv_cache") if sleeper is not None else ():
            sleeper.wake_up(tag)

    def transfer(
        self, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]], watch: TransferProbe,
        running: sender.Running = "none",
        before_caches: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Poison the engine, draw the stream on every rank, which is a collective, and send it from rank 0.

        The engine gets memory for its weights first, and for its caches afterwards.

        Args:
            plan: by which the weights travel.
            stream: (checkpoint name, tensor).
            watch: told of the transfer.
            running: requests of the engine meanwhile.
            before_caches: called on every rank once the weights have arrived.
        """
        sleeper, self.asleep = self.asleep, None
        if sleeper is not None:
            sleeper.wake_up("weights")
        try:
            if self.client is not None and self.group is not None:
                watch.poisoned(self.client.poison())
                self.refused = sender.transfer(self.client, self.group, plan, stream, watch, self.rounds, running)
            elif self.rounds is not None:
                from verifier.transport.cuda_ipc import follow

                follow(self.rounds, plan, stream)
            for _ in stream:
                pass
            before_caches()
        finally:
            if sleeper is not None:
                sleeper.wake_up("kv_cache")


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """One session, as one rank sees it."""

    spec: RunSpec
    context: RankContext
    probe: Recorder
    link: EngineLink

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def mesh(self) -> Mesh:
        """Parallel sizes of the trainer."""
        return self.spec.config.mesh

    @property
    def work(self) -> Path:
        """Folder for what processes hand to each other."""
        return Path(self.spec.work)

    @cached_property
    def source(self) -> Checkpoint:
        """Checkpoint of version 0."""
        return open_checkpoint(self.spec.checkpoint)

    @cached_property
    def layout(self) -> ModelLayout | DerivedLayout | None:
        """Layout of its family, else the derived one; None where there is neither."""
        derived = None if self.spec.layout is None else DerivedLayout.from_json(self.spec.layout)
        return layout_of(self.source.config) or derived

    def say(self, text: str) -> None:
        """Show one line of progress, from rank 0."""
        if self.rank == 0:
            self.context.progress(text)

    def folder(self, name: str) -> Path:
        """A new folder in `work`, for all ranks to write into. A collective."""
        path = self.work / name
        if self.rank == 0:
            path.mkdir()
        dist.barrier()
        return path


@contextlib.contextmanager
def rank_run(spec: RunSpec, context: RankContext) -> Iterator[RankRun]:
    """A session's context, open until the session ends; a collective with the engine's ranks."""
    link, trace, deadline_s = EngineLink(), Path(spec.trace), spec.deadline_s
    with contextlib.ExitStack() as stack:

        def recorder(role: Role, rank: int) -> Recorder:
            return stack.enter_context(contextlib.closing(Recorder(trace, role, rank)))

        probe = recorder("trainer", context.rank)
        if spec.engine_socket is not None:
            link.sleep_level = spec.roundtrip.engine.sleep_level
            if spec.transport == "ipc":
                from verifier.transport.cuda_ipc import TrainerRounds

                link.rounds = TrainerRounds()
            if context.rank == 0:
                from verifier.transport.gloo import Listener

                client = EngineClient(spec.engine_socket, deadline_s=deadline_s)
                link.client = stack.enter_context(contextlib.closing(client))
                num_ranks = spec.roundtrip.engine.tp
                link.ranks = [recorder("engine", rank) for rank in range(num_ranks)]
                closed = Path(spec.engine_socket).parent
                listener = Listener(num_ranks, deadline_s=deadline_s, kind=spec.transport, folder=closed)
                link.group = stack.enter_context(contextlib.closing(sender.connect(client, listener, link.rounds)))
        yield RankRun(spec=spec, context=context, probe=probe, link=link)
