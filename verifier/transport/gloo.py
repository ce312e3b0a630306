"""The transfer group of one sender (rank 0) and all engine ranks: bytes by gloo, every wait with a deadline."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.control_channel import ControlChannel
from verifier.transport.wire import AHEAD, Address, Agreement, TransferFailed, overdue


class GlooGroup:
    """A joined transfer group that moves bytes from host to host. Not for several threads."""

    refills = False
    """A received buffer is never written again."""

    def __init__(self, store: TCPStore, rank: int, address: Address) -> None:
        self.rank = rank
        self.address = address
        self.store = store
        """Where a group of the same members finds them."""
        self._under_way: deque[Callable[[], None]] = deque()
        self._control = ControlChannel(store, rank, address)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address.host)]
        options._timeout = timedelta(seconds=address.deadline_s)
        self._group = self._bounded(
            "the others to join",
            lambda: ProcessGroupGloo(PrefixStore("transfer", store), rank, address.world_size, options),
        )

    def begin(self, plan: ChunkPlan) -> Agreement:
        """Say this member's plan digest and hear everyone's, once what an earlier update left under way has ended."""
        self.end()
        return self.agree(plan.digest)

    def agree(self, word: str) -> Agreement:
        """Propose one short message and wait for all members; every one sees the same agreement."""
        return self.propose(word)()

    def propose(self, word: str) -> Callable[[], Agreement]:
        """Start to agree on a word; see `ControlChannel.propose`."""
        return self._control.propose(word)

    def place(self, num_bytes: int) -> torch.Tensor | None:
        """Where the sender packs its next chunk: in fresh memory."""

    def offer(self, word: str, buffer: torch.Tensor, what: str) -> Callable[[], Agreement]:
        """The sender's side of a chunk: start to agree on it; a GPU's buffer goes by the host.

        Args:
            word: says which chunk.
            buffer: [num_bytes] uint8; not to be changed before all receivers have confirmed it.
            what: names the content in errors.

        Returns:
            Waits for what the others say, and if all agree, starts to send; to be called before the next offer.
        """
        heard = self.propose(word)

        def send() -> Agreement:
            step = heard()
            if step.reached:
                while len(self._under_way) > AHEAD:  # confirmed by every receiver by now
                    self._under_way.popleft()()
                self._under_way.append(self.broadcast(buffer.cpu(), what))
            return step

        return send

    def post(self, chunk: Chunk, what: str) -> Callable[[], torch.Tensor]:
        """A receiver's side of a chunk that all agreed on: make room for it and let it come.

        Returns:
            Waits until it has come, and hands over its bytes [chunk.num_bytes] uint8 in memory of the host.
        """
        buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cpu")
        self._under_way.append(self.broadcast(buffer, what))

        def arrived() -> torch.Tensor:
            self._under_way.popleft()()
            return buffer

        return arrived

    def end(self) -> None:
        """Wait until nothing is under way; what has come and was not asked for is dropped.

        Raises:
            TransferFailed: a member did not arrive before the deadline.
        """
        while self._under_way:
            self._under_way.popleft()()

    def broadcast(self, buffer: torch.Tensor, what: str) -> Callable[[], None]:
        """Start to copy from rank 0 to all, in place.

        Args:
            buffer: [num_bytes] uint8, the same size everywhere.
            what: names the content in the error.

        Returns:
            Waits for the end; raises TransferFailed if a member did not arrive before the deadline.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        return self._started(what, lambda group: group.broadcast([buffer], options))

    def close(self) -> None:
        """Leave the group; the others' next wait fails at once."""
        self._under_way.clear()
        self._control.close()
        self._group = None
        self.store = None

    def _started(self, what: str, start: Callable[[ProcessGroupGloo], Work]) -> Callable[[], None]:
        """Start a collective; what is returned waits for it."""
        group = self._group
        if group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        work = self._bounded(what, lambda: start(group))
        return lambda: self._bounded(what, lambda: work.wait(timedelta(seconds=self.address.deadline_s)))

    def _bounded[T](self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise overdue(self.rank, self.address, what, error) from error


class Listener:
    """The sender's open door: `address` is handed to the engine, then `accept` waits for its ranks."""

    def __init__(self, num_receivers: int, *, deadline_s: float, host: str = "127.0.0.1", kind: str = "gloo") -> None:
        door = socket.create_server((host, 0))
        port = door.getsockname()[1]
        self.address = Address(host=host, port=port, world_size=num_receivers + 1, deadline_s=deadline_s, kind=kind)
        self._store = TCPStore(
            host,
            port,
            world_size=num_receivers + 1,
            is_master=True,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=door.detach(),
        )

    def accept(self) -> GlooGroup:
        """Wait for every engine rank; TransferFailed after the deadline."""
        return GlooGroup(self._store, 0, self.address)


def join(address: Address, rank: int) -> GlooGroup:
    """Join as an engine rank.

    Args:
        address: the listener's.
        rank: in the group: engine rank + 1.

    Raises:
        TransferFailed: nobody listens there, or a member did not join before the deadline.
    """
    deadline = timedelta(seconds=address.deadline_s)
    try:
        store = TCPStore(address.host, address.port, address.world_size, False, deadline, wait_for_workers=False)
    except RuntimeError as error:
        raise TransferFailed(f"no sender listens at {address.host}:{address.port}: {error}") from error
    return GlooGroup(store, rank, address)
