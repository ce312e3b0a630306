"""Interface of transfer groups, and the common part of groups that broadcast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import BroadcastOptions

from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.wire import AHEAD, Address, Agreement, TransferFailed

if TYPE_CHECKING:
    from verifier.transport.gloo import ControlChannel


class TransferGroup(ABC):
    """A joined group of one sender (rank 0) and all engine ranks. Not thread-safe."""

    refills = False
    """True if receivers read in place what all agreed on, and the sender overwrites it once its chunk is confirmed."""
    rank: int
    address: Address
    _control: ControlChannel | TransferGroup
    """Channel of short messages of the same members, or a group that has one."""

    def begin(self, plan: ChunkPlan) -> Agreement:
        """Finish what an earlier update left pending, then compare the members' plan digests."""
        self.end()
        return self.agree(plan.digest)

    def agree(self, message: str) -> Agreement:
        """Exchange one short message; every member gets the same agreement."""
        return self.propose(message)()

    def propose(self, message: str) -> Callable[[], Agreement]:
        """Start to exchange a message; see `ControlChannel.propose`."""
        return self._control.propose(message)

    def place(self, num_bytes: int) -> torch.Tensor | None:
        """Return the buffer that the sender must pack its next chunk into; None for fresh memory."""
        return None

    def confirmed(self) -> None:
        """Tell the sender's group that all receivers have confirmed the oldest chunk that they had not."""
        return

    @abstractmethod
    def offer(self, message: str, buffer: torch.Tensor, what: str) -> Callable[[], Agreement]:
        """Start the sender's side of a chunk.

        Args:
            message: message that names the chunk.
            buffer: [num_bytes] uint8; must not change before all receivers have confirmed the chunk.
            what: name of the content, for errors.

        Returns:
            Function that waits for the agreement and, if it is reached, starts to send. Call it before the next offer.
        """

    @abstractmethod
    def post(self, chunk: Chunk, what: str) -> Callable[[], torch.Tensor]:
        """Start a receiver's side of a chunk that all members agreed on.

        Returns:
            Function that waits for the chunk, on a GPU in the current stream, and returns its bytes, [chunk.num_bytes]
            uint8.
        """

    @abstractmethod
    def end(self) -> None:
        """Wait until nothing is pending, and drop buffers that nobody asked for."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; the other members' next wait fails."""


class BroadcastGroup(TransferGroup):
    """A transfer group that sends chunks by broadcasts from rank 0 and receives them into fresh memory."""

    device = "cpu"
    """Device that buffers are sent from and received on."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()
        self._group: Any = None
        """Process group of torch whose members have joined; None once it was left."""

    @abstractmethod
    def failed(self, what: str, error: RuntimeError) -> TransferFailed:
        """Error of a broadcast of `what`, or of the wait for the others, that torch ended with `error`."""

    def end_of(self, work: Any) -> None:
        """Wait for a broadcast that was started."""
        work.wait()

    def broadcast(self, buffer: torch.Tensor, what: str) -> Callable[[], None]:
        """Start to copy a buffer from rank 0 to all members, in place.

        Args:
            buffer: [num_bytes] uint8 on `device`, the same size on every member.
            what: name of the content, for errors.

        Returns:
            Function that waits for the end, on a GPU in the current stream; it raises TransferFailed if a member fails
            or is late.
        """
        group = self._group
        if group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        options = BroadcastOptions()
        options.rootRank = 0
        work = self.tried(what, lambda: group.broadcast([buffer], options))
        return lambda: self.tried(what, lambda: self.end_of(work))

    def tried(self, what: str, call: Callable[[], Any]) -> Any:
        """Result of a call of torch; raises `failed` where it fails."""
        try:
            return call()
        except RuntimeError as error:
            raise self.failed(what, error) from error

    def offer(self, message: str, buffer: torch.Tensor, what: str) -> Callable[[], Agreement]:
        """See `TransferGroup.offer`; a buffer on another device is copied first."""
        received = self.propose(message)

        def send() -> Agreement:
            agreement = received()
            if agreement.reached:
                while len(self._pending) > AHEAD:  # every receiver has confirmed the oldest: it does not block
                    self._wait_for_oldest()
                self._start(buffer.to(self.device), what)
            return agreement

        return send

    def post(self, chunk: Chunk, what: str) -> Callable[[], torch.Tensor]:
        """See `TransferGroup.post`; chunks come in the order in which they are posted."""
        self._start(torch.empty(chunk.num_bytes, dtype=torch.uint8, device=self.device), what)
        return self._wait_for_oldest

    def end(self) -> None:
        """See `TransferGroup.end`."""
        while self._pending:
            self._wait_for_oldest()

    def _start(self, buffer: torch.Tensor, what: str) -> None:
        self._pending.append((buffer, self.broadcast(buffer, what)))

    def _wait_for_oldest(self) -> torch.Tensor:
        buffer, wait = self._pending.popleft()
        wait()
        return buffer
