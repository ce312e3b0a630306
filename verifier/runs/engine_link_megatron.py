"""This rank's end of the link to the engine: rank 0 talks to it, and by CUDA IPC every rank shows it a buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.core.store import Recorder
from verifier.engine import sender
from verifier.engine.client import EngineClient
from verifier.plan.chunk_plan import ChunkPlan
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    import torch

    from verifier.transport.cuda_ipc import TrainerRounds
    from verifier.transport.group import TransferGroup


@dataclass(kw_only=True)
class EngineLink:
    """The link of one rank; without an engine it has nothing."""

    client: EngineClient | None = None
    """A connection of its own; rank 0's only."""
    group: TransferGroup | None = None
    """Transfer group that the engine has joined; rank 0's only."""
    rounds: TrainerRounds | None = None
    """Rounds in which buffers are shown to the engine; every rank's, by CUDA IPC only."""
    ranks: Sequence[Recorder] = ()
    """A recorder for each engine rank; rank 0's only."""
    refused: bool = False
    """The last transfer was refused: layers whose weights never came are left open, and cannot score."""
    sleep_level: int = 0
    """Level at which the engine sleeps while the trainer steps; 0: never."""
    asleep: bool = False

    def rest(self) -> None:
        """Have the engine give up its GPU memory until the next transfer. A collective.

        The engine counts the memory that it frees, so no rank takes any meanwhile.
        """
        if self.sleep_level:
            if self.client is not None:
                self.client.sleep(self.sleep_level)
                self.asleep = True
            dist.barrier()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The engine has memory for its weights within, and for its caches afterwards."""
        asleep, self.asleep = self.asleep, False
        if asleep and self.client is not None:
            self.client.wake_up("weights")
        try:
            yield
        finally:
            if asleep and self.client is not None:
                self.client.wake_up("kv_cache")

    def transfer(self, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]], watch: sender.TransferWatch) -> str:
        """Draw the stream on every rank, which is a collective, and send it from rank 0.

        Returns:
            Why the engine refused the transfer; empty if it did not.
        """
        refused = ""
        if self.client is not None and self.group is not None:
            refused = sender.transfer(self.client, self.group, plan, stream, watch, self.rounds)
            self.refused = bool(refused)
        elif self.rounds is not None:
            from verifier.transport.cuda_ipc import follow

            follow(self.rounds, plan, stream)
        for _ in stream:
            pass
        return refused


@contextlib.contextmanager
def engine_link(spec: RunSpec, rank: int) -> Iterator[EngineLink]:
    """This rank's link to the engine of a session; a collective with the engine's ranks."""
    if spec.engine_socket is None:
        yield EngineLink()
        return
    link = EngineLink(sleep_level=spec.roundtrip.engine.sleep_level)
    if spec.transport == "ipc":
        from verifier.transport.cuda_ipc import TrainerRounds

        link.rounds = TrainerRounds()
    with contextlib.ExitStack() as stack:
        if rank == 0:
            from verifier.transport.gloo import Listener

            client = EngineClient(spec.engine_socket, deadline_s=spec.deadline_s)
            link.client = stack.enter_context(contextlib.closing(client))
            link.ranks = [Recorder(Path(spec.trace), "engine", each) for each in range(spec.engine_ranks)]
            for recorder in link.ranks:
                stack.callback(recorder.close)
            listener = Listener(spec.engine_ranks, deadline_s=spec.deadline_s, kind=spec.transport)
            link.group = stack.enter_context(contextlib.closing(sender.connect(client, listener, link.rounds)))
        yield link
