"""The transfer group of engines on the trainer's own GPUs: each engine rank reads the buffer of the rank beside it.

Every trainer rank packs the whole chunk into a buffer of its own and describes it; the descriptions go to the engine
keyed by the GPU's UUID, which stays the same whatever number a process gives the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verifier.errors import ContractError
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.buffer import pack
from verifier.transport.gloo import GlooGroup
from verifier.transport.wire import Agreement

JSON = Any
TAKEN = "taken"
_HANDLE, _REFERENCES, _EVENT = 7, 11, 13
"""Places in torch's description of a shared tensor that hold bytes."""
_DESCRIBED = (3, 7, 8, 9, 11, 12, 13, 14)
"""Places that the receiver cannot know: offsets, sizes and handles."""


class Share:
    """The trainer ranks' rounds: in each, every rank shows the others one record, or that it stops.

    A round is a collective of all trainer ranks. After a round in which anyone stopped there are no more.
    """

    def __init__(self) -> None:
        self._open = False

    def begin(self, *, go: bool) -> bool:
        """Open the rounds of one transfer; False if a rank says that there is nothing to send."""
        self._open = True
        return self._round({} if go else None) is not None

    def show(self, record: dict[str, JSON]) -> list[dict[str, JSON]]:
        """One round.

        Raises:
            ContractError: another rank stopped.
        """
        rows = self._round(record)
        if rows is None:
            raise ContractError("a trainer rank stopped before the transfer was complete: its log says why")
        return rows

    def stop(self) -> None:
        """Tell the others that no more rounds come, if they do not know."""
        if self._open:
            self._round(None)

    def end(self) -> None:
        """The last round: what was shown before it is no longer read."""
        if self._open:
            self._round({})
            self._open = False

    def _round(self, record: dict[str, JSON] | None) -> list[dict[str, JSON]] | None:
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, record)
        if any(row is None for row in rows):
            self._open = False
            return None
        return rows


def follow(share: Share, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """A trainer rank other than 0: pack every chunk that rank 0 sends, and show where it lies; draws the whole stream.

    The last two buffers are kept: the engine may still read one while the next is packed.

    Args:
        share: this rank's end of the rounds.
        plan: the agreed plan.
        stream: the export, drawn in lockstep by all ranks.
    """
    held: list[torch.Tensor] = []
    if share.begin(go=True):
        try:
            for chunk in plan.chunks:
                drawn = dict(islice(stream, len(chunk.entries)))
                held = [*held[-1:], pack(chunk, drawn)]
                share.show(describe(held[-1]))
            share.end()
        except ContractError:
            share.stop()
    for _ in stream:
        pass


def gpu_uuid() -> str:
    """The physical identity of this process's current GPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def describe(buffer: torch.Tensor) -> dict[str, JSON]:
    """What another process needs to open a uint8 vector on this process's GPU; the buffer must outlive its reading."""
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    arguments = reduce_tensor(buffer)[1]
    values = [item.hex() if isinstance(item, bytes) else item for item in (arguments[place] for place in _DESCRIBED)]
    return {"gpu": gpu_uuid(), "num_bytes": buffer.numel(), "values": values}


def open_buffer(record: dict[str, JSON]) -> torch.Tensor:
    """The other process's memory as a uint8 vector [num_bytes], without a copy."""
    known = dict(zip(_DESCRIBED, record["values"], strict=True))
    for place in (_HANDLE, _REFERENCES, _EVENT):
        known[place] = bytes.fromhex(known[place])
    fixed = {
        0: torch.Tensor, 1: torch.Size([record["num_bytes"]]), 2: (1,), 4: torch.storage.TypedStorage, 5: torch.uint8,
        6: torch.cuda.current_device(), 10: False,
    }  # fmt: skip
    arguments = known | fixed
    return rebuild_cuda_tensor(*(arguments[place] for place in range(len(arguments))))


class IpcGroup:
    """A joined transfer group in which no byte is sent: the receivers copy out of the senders' memory.

    Args:
        words: the group of trainer rank 0 and the engine ranks.
        show: on trainer rank 0: takes this rank's description and returns those of all trainer ranks.
    """

    def __init__(self, words: GlooGroup, show: Callable[[dict[str, JSON]], Sequence[dict[str, JSON]]] | None) -> None:
        self.rank, self.address = words.rank, words.address
        self._words, self._show = words, show

    def agree(self, word: str) -> Agreement:
        """See `GlooGroup.agree`."""
        return self._words.agree(word)

    def send(self, buffer: torch.Tensor, what: str) -> None:
        """Tell every engine rank where the buffers lie, and wait until all have copied.

        Args:
            buffer: [num_bytes] uint8 on this rank's GPU.
            what: names the content in the error.

        Raises:
            ContractError: another trainer rank stopped, or this is not the sender.
            TransferFailed: an engine rank did not answer before the deadline.
        """
        if self._show is None:
            raise ContractError(f"transfer rank {self.rank} is a receiver and cannot send {what}")
        rows = {row["gpu"]: row for row in self._show(describe(buffer.to("cuda")))}
        text = json.dumps(rows).encode()
        self._words.broadcast(torch.tensor([len(text)]).view(torch.uint8), f"the size of the handles of {what}")
        self._words.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), f"the handles of {what}")
        self._words.agree(TAKEN)

    def receive(self, num_bytes: int, what: str) -> torch.Tensor:
        """A copy of the buffer on this rank's own GPU, as [num_bytes] uint8.

        Raises:
            ContractError: no trainer rank shares a buffer on this GPU, or one of another size.
            TransferFailed: a member did not answer before the deadline.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._words.broadcast(size.view(torch.uint8), f"the size of the handles of {what}")
        text = torch.empty(int(size), dtype=torch.uint8)
        self._words.broadcast(text, f"the handles of {what}")
        rows = json.loads(bytes(text.tolist()))
        mine = rows.get(gpu_uuid())
        if mine is None or mine["num_bytes"] != num_bytes:
            self._words.agree("refused")
            shared = ", ".join(sorted(rows))
            raise ContractError(
                f"engine rank {self.rank - 1} runs on {gpu_uuid()} and was given no buffer of {num_bytes} bytes there "
                f"for {what}: the trainer shares buffers on {shared}"
            )
        copy = open_buffer(mine).clone()
        torch.cuda.synchronize()
        self._words.agree(TAKEN)
        return copy

    def close(self) -> None:
        """Leave the group."""
        self._words.close()
