"""The transfer group of engines on other GPUs than the sender's: bytes by NCCL, words by TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupNCCL, Work

from verifier.errors import UsageError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.gloo import GlooGroup
from verifier.transport.wire import AHEAD, Agreement, TransferFailed


class NcclGroup:
    """A joined transfer group that broadcasts from GPU to GPU. Not for several threads.

    Broadcasts run on a stream of NCCL's own, each after what its GPU's current stream was given before it, and ahead of
    it where both could run: a chunk that is digested does not keep the next one from coming. A buffer is
    kept until the current stream has been told to wait for its broadcast: its memory is not given out again earlier.
    The communicator comes up with the first buffer, in which all members meet.

    Args:
        control: the group of the same members, over which they agree before a byte moves.

    Raises:
        UsageError: torch sees no GPU in this process.
    """

    refills = False
    """A received buffer is never written again."""

    def __init__(self, control: GlooGroup) -> None:
        if not torch.cuda.is_available():
            raise UsageError("a transfer by NCCL needs a GPU on both sides: use --transport gloo")
        self.rank, self.address = control.rank, control.address
        self._control = control
        self._under_way: deque[tuple[Work, torch.Tensor, str]] = deque()
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.address.deadline_s)
        self._group = ProcessGroupNCCL(PrefixStore("nccl", control.store), self.rank, self.address.world_size, options)

    def begin(self, plan: ChunkPlan) -> Agreement:
        """See `GlooGroup.begin`."""
        self.end()
        return self._control.begin(plan)

    def agree(self, word: str) -> Agreement:
        """See `GlooGroup.agree`."""
        return self._control.agree(word)

    def propose(self, word: str) -> Callable[[], Agreement]:
        """See `ControlChannel.propose`."""
        return self._control.propose(word)

    def place(self, num_bytes: int) -> torch.Tensor | None:
        """Where the sender packs its next chunk: in fresh memory."""

    def offer(self, word: str, buffer: torch.Tensor, what: str) -> Callable[[], Agreement]:
        """See `GlooGroup.offer`; the GPU sends once its current stream has packed. A host's buffer is copied there."""
        heard = self.propose(word)

        def send() -> Agreement:
            step = heard()
            if step.reached:
                while len(self._under_way) > AHEAD:  # confirmed by every receiver: the stream waits for nothing
                    self._join()
                self._start(buffer.to("cuda"), what)
            return step

        return send

    def post(self, chunk: Chunk, what: str) -> Callable[[], torch.Tensor]:
        """See `GlooGroup.post`: the bytes come to fresh memory of this GPU, whose current stream waits for them."""
        self._start(torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cuda"), what)
        return self._join

    def end(self) -> None:
        """Let go of what is under way, once the current stream has come past it."""
        while self._under_way:
            self._join()

    def close(self) -> None:
        """Leave the group."""
        self._under_way.clear()
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._control.close()

    def _start(self, buffer: torch.Tensor, what: str) -> None:
        if self._group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            self._under_way.append((self._group.broadcast([buffer], options), buffer, what))
        except RuntimeError as error:
            raise self._failed(what, error) from error

    def _join(self) -> torch.Tensor:
        """Make the current stream wait for the oldest broadcast under way, and hand its buffer over."""
        work, buffer, what = self._under_way.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(what, error) from error
        return buffer

    def _failed(self, what: str, error: RuntimeError) -> TransferFailed:
        why = str(error).splitlines()[0]
        return TransferFailed(f"the NCCL broadcast of {what} failed on transfer rank {self.rank}: {why}")
