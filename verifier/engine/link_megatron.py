"""Link of one trainer rank to the engines that it sends weights to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.engine import sender
from verifier.engine.api import TransferWatch
from verifier.engine.client import EngineClient, is_far
from verifier.engine.replicas import clients_of
from verifier.plan.chunk_plan import ChunkPlan

if TYPE_CHECKING:
    import torch

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
    refused: str = ""
    """Why the last transfer was refused: layers whose weights never came are left open, and cannot score."""
    sleep_level: int = 0
    """Level at which the engine sleeps while the trainer steps; 0: never."""
    asleep: EngineClient | None = None
    """The client of an engine that sleeps."""

    @classmethod
    def of(cls, transport: str, sleep_level: int) -> EngineLink:
        """A link by "gloo", "nccl" or "ipc" that is not connected, of every rank."""
        if transport != "ipc":
            return cls(sleep_level=sleep_level)
        from verifier.transport.cuda_ipc import TrainerRounds

        return cls(sleep_level=sleep_level, rounds=TrainerRounds())

    def connect(
        self, stack: contextlib.ExitStack, sockets: Sequence[str], num_ranks: int, transport: str, deadline_s: float,
        met: Callable[[EngineClient], None] = lambda client: None, *, shared: Path | None = None,
    ) -> None:  # fmt: skip
        """Connect rank 0 to the engines, and have them join a transfer group; both end with the stack.

        A request, or a rank of an engine, may take `deadline_s`. `met` is called with the client before the group is
        made. `shared` is a folder that all nodes see, for engines on other nodes than
        this rank's.
        """
        from verifier.transport.gloo import LOOPBACK, Listener

        client = self.client = stack.enter_context(contextlib.closing(clients_of(sockets, deadline_s)))
        met(client)
        folder, host = Path(sockets[0]).parent, LOOPBACK
        if far := shared is not None and any(map(is_far, sockets)):
            folder, host = shared.absolute(), os.environ["MASTER_ADDR"]
        listener = Listener(num_ranks, deadline_s=deadline_s, kind=transport, folder=folder, host=host)
        try:
            self.group = stack.enter_context(contextlib.closing(sender.connect(client, listener, self.rounds)))
        finally:
            if far:  # all have found each other, or will not
                os.unlink(listener.address.store)

    def rest(self, level: int | None = None) -> None:
        """Have the engine give up its GPU memory until the next transfer, or `wake`. A collective.

        The engine counts the memory that it frees, so no rank takes any meanwhile. The level is `sleep_level` by
        default.
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
        self, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]], watch: TransferWatch,
        running: sender.Running = "none",
        before_caches: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Poison the engine, draw the stream on every rank, which is a collective, and send it from rank 0.

        The engine gets memory for its weights first, and for its caches afterwards. `before_caches` is called on every
        rank once the weights have arrived.
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
