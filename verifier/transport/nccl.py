"""Transfer group over NCCL: bytes move from GPU to GPU, control messages over TCP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupNCCL

from verifier.errors import UsageError
from verifier.transport.gloo import GlooGroup
from verifier.transport.group import BroadcastGroup
from verifier.transport.wire import Agreement, TransferFailed


class NcclGroup(BroadcastGroup):
    """A joined transfer group that broadcasts from GPU to GPU.

    A broadcast runs on NCCL's own high-priority stream after all work that the current stream was given before. So the
    digest of one chunk does not delay the arrival of the next. A buffer is kept until the current stream has been told
    to wait for its broadcast. The communicator is made at the first broadcast, in which all members take part.

    Args:
        control: group of the same members, for control messages.

    Raises:
        UsageError: torch sees no GPU in this process.
    """

    device = "cuda"

    def __init__(self, control: GlooGroup) -> None:
        if not torch.cuda.is_available():
            raise UsageError("a transfer by NCCL needs a GPU on both sides: use --transport gloo")
        super().__init__()
        self.rank, self.address = control.rank, control.address
        self._control = control
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.address.deadline_s)
        store = PrefixStore("nccl", control.store)
        self._group: ProcessGroupNCCL | None = ProcessGroupNCCL(store, self.rank, self.address.world_size, options)

    def propose(self, message: str) -> Callable[[], Agreement]:
        """See `ControlChannel.propose`."""
        return self._control.propose(message)

    def broadcast(self, buffer: torch.Tensor, what: str) -> Callable[[], None]:
        """See `BroadcastGroup.broadcast`; waiting makes the current stream wait."""
        group = self._group
        if group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        options = BroadcastOptions()
        options.rootRank = 0
        work = self._checked(what, lambda: group.broadcast([buffer], options))
        return lambda: self._checked(what, work.wait)

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self._pending.clear()
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._control.close()

    def _checked(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise TransferFailed(f"the NCCL broadcast of {what} failed on transfer rank {self.rank}: {why}") from error
