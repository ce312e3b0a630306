"""Transfer group over NCCL: bytes move from GPU to GPU, control messages over TCP."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupNCCL

from verifier.errors import UsageError
from verifier.transport.gloo import GlooGroup
from verifier.transport.group import BroadcastGroup
from verifier.transport.wire import TransferFailed


class NcclGroup(BroadcastGroup):
    """A joined transfer group that broadcasts from GPU to GPU.

    A broadcast runs on NCCL's own high-priority stream after all work that the current stream was given before. So the
    digest of one chunk does not delay the arrival of the next. A buffer is kept until the current stream has been told
    to wait for its broadcast. The communicator is made at the first broadcast, in which all members take part.

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
        self._group = ProcessGroupNCCL(store, self.rank, self.address.world_size, options)

    def failed(self, what: str, error: RuntimeError) -> TransferFailed:
        """See `BroadcastGroup.failed`."""
        why = str(error).splitlines()[0]
        return TransferFailed(f"the NCCL broadcast of {what} failed on transfer rank {self.rank}: {why}")

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self._pending.clear()
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._control.close()
