"""The transfer group of engines on other GPUs than the sender's: bytes by NCCL, words by gloo."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupNCCL, Work

from verifier.errors import UsageError
from verifier.transport.gloo import GlooGroup
from verifier.transport.wire import Agreement, TransferFailed


class NcclGroup:
    """A joined transfer group that broadcasts from GPU to GPU. Not for several threads.

    The communicator comes up with the first buffer, in which all members meet.

    Args:
        words: the group of the same members, over which they agree before a byte moves.

    Raises:
        UsageError: torch sees no GPU in this process.
    """

    def __init__(self, words: GlooGroup) -> None:
        if not torch.cuda.is_available():
            raise UsageError("a transfer by NCCL needs a GPU on both sides: use --transport gloo")
        self.rank, self.address = words.rank, words.address
        self._words = words
        self._under_way: tuple[Work, torch.Tensor, str] | None = None
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.address.deadline_s)
        self._group = ProcessGroupNCCL(PrefixStore("nccl", words.store), self.rank, self.address.world_size, options)

    def agree(self, word: str) -> Agreement:
        """See `GlooGroup.agree`; the buffer under way, if any, has arrived by then."""
        self._finish()
        return self._words.agree(word)

    def send(self, buffer: torch.Tensor, what: str) -> None:
        """From rank 0 to all; returns at once, so that the next buffer can be packed while this one travels.

        Args:
            buffer: [num_bytes] uint8; copied to the GPU if it is not there.
            what: names the content in the error.

        Raises:
            TransferFailed: a member did not take the buffer before this one before the deadline.
        """
        self._start(buffer.to("cuda"), what)

    def receive(self, num_bytes: int, what: str) -> torch.Tensor:
        """What rank 0 sends, as [num_bytes] uint8 in fresh memory of this rank's GPU.

        Raises:
            TransferFailed: a member did not arrive before the deadline.
        """
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._start(buffer, what)
        self._finish()
        return buffer

    def close(self) -> None:
        """Leave the group."""
        self._under_way = None
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._words.close()

    def _start(self, buffer: torch.Tensor, what: str) -> None:
        self._finish()
        if self._group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        options = BroadcastOptions()
        options.rootRank = 0
        self._under_way = (self._group.broadcast([buffer], options), buffer, what)

    def _finish(self) -> None:
        """Wait until the buffer under way has arrived."""
        if self._under_way is None:
            return
        work, _, what = self._under_way
        self._under_way = None
        deadline = time.monotonic() + self.address.deadline_s
        try:
            work.wait()  # the stream waits, not this thread: torch's own timed wait sleeps a millisecond at a time
            arrived = torch.cuda.Event()
            arrived.record()
            while not arrived.query():
                if time.monotonic() > deadline:
                    raise TransferFailed(self._late(what, "it is still under way"))
        except RuntimeError as error:
            raise TransferFailed(self._late(what, str(error).splitlines()[0])) from error

    def _late(self, what: str, why: str) -> str:
        waited = f"transfer rank {self.rank} waited up to {self.address.deadline_s:g} s"
        return f"{waited} in an NCCL broadcast of {what}: {why}"
