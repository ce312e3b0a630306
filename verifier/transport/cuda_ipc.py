"""The transfer group of engines on the trainer's own GPUs: each engine rank reads the memory of the rank beside it.

Every trainer rank packs each chunk into a slot of a ring of its own. The ring is described once per update, keyed by
the GPU's UUID, which stays the same whatever number a process gives the GPU; engine ranks open it before a byte is
loaded and read it in place. Of ranks that share a GPU the first one's ring is read. A slot is filled again only when
every engine rank has confirmed what was in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.buffer import pack
from verifier.transport.gloo import GlooGroup
from verifier.transport.wire import AHEAD, Agreement

JSON = Any
SLOTS = AHEAD + 2
"""One that is read, those on their way, and one that is packed."""
FOUND, ABSENT = "found on ", "none on "
"""What an engine rank says of the ring on its GPU, before the GPU's UUID."""
_HANDLE, _REFERENCES, _EVENT = 7, 11, 13
"""Places in torch's description of a shared tensor that hold bytes."""
_DESCRIBED = (3, 7, 8, 9, 11, 12, 13, 14)
"""Places that the receiver cannot know: offsets, sizes and handles."""


class Share:
    """The trainer ranks' rounds: in each, every rank shows the others one record, or that it stops.

    A round is a collective of all trainer ranks. After a round in which anyone stopped there are no more.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._open = False

    def begin(self) -> None:
        """The rounds of one transfer begin; every rank says so to itself."""
        self._open = True

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


class Ring:
    """A trainer rank's send buffers for one update: `SLOTS` of them in one piece of its GPU's memory.

    Args:
        plan: the greatest of its chunks sets the size of a slot.
    """

    def __init__(self, plan: ChunkPlan) -> None:
        self._slot_bytes = max(chunk.num_bytes for chunk in plan.chunks)
        self._memory = allocate(SLOTS * self._slot_bytes)
        self._filled = [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)]
        self._placed = 0
        self._description = {**describe(self._memory), "slot_bytes": self._slot_bytes}

    def place(self, num_bytes: int) -> torch.Tensor:
        """The next slot's first bytes; what was in it has been confirmed by every engine rank."""
        begin = self._placed % SLOTS * self._slot_bytes
        self._placed += 1
        return self._memory[begin : begin + num_bytes]

    def fill(self, index: int) -> None:
        """Mark on the GPU's current stream that the chunk of this index has been packed."""
        self._filled[index % SLOTS].record()

    def describe(self) -> dict[str, JSON]:
        """What another process needs to open the ring on the same GPU; the ring must outlive its reading."""
        return {**self._description, "filled": [event.ipc_handle().hex() for event in self._filled]}

    def unread(self) -> None:
        """No engine rank has opened the ring: its memory is not kept for one that might."""
        release(self._description)


class OpenRing:
    """A `Ring` of another process, on this process's GPU."""

    def __init__(self, record: dict[str, JSON]) -> None:
        self._slot_bytes: int = record["slot_bytes"]
        self._memory = open_buffer(record)
        device = torch.device("cuda", torch.cuda.current_device())
        self._filled = [torch.cuda.Event.from_ipc_handle(device, bytes.fromhex(handle)) for handle in record["filled"]]

    def read(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes in place; the current stream waits until they are packed."""
        slot = chunk.index % SLOTS
        torch.cuda.current_stream().wait_event(self._filled[slot])
        return self._memory[slot * self._slot_bytes :][: chunk.num_bytes]


def follow(share: Share, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """A trainer rank other than 0: pack every chunk that rank 0 sends, and say so; draws the whole stream.

    A rank whose ring no engine rank reads packs nothing. Rank 0 takes part in the round of a chunk only when the
    chunk before the one before it has been confirmed: the slot that is packed next is free.

    Args:
        share: this rank's end of the rounds.
        plan: the agreed plan.
        stream: the export, drawn in lockstep by all ranks.
    """
    ring, is_read = Ring(plan), False
    share.begin()
    try:
        share.show(ring.describe())
        is_read = share.rank in share.show({})[0]["read"]
        for chunk in plan.chunks:
            drawn = dict(islice(stream, len(chunk.entries)))
            if is_read:
                pack(chunk, drawn, ring.place(chunk.num_bytes))
                ring.fill(chunk.index)
            share.show({})
        share.end()
    except ContractError:
        share.stop()
    if not is_read:
        ring.unread()
    for _ in stream:
        pass


def gpu_uuid() -> str:
    """The physical identity of this process's current GPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def allocate(num_bytes: int) -> torch.Tensor:
    """Memory of this process's GPU; what earlier readers have closed is taken back first."""
    torch.cuda.ipc_collect()
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def describe(memory: torch.Tensor) -> dict[str, JSON]:
    """What another process needs to open a uint8 vector on this process's GPU."""
    arguments = reduce_tensor(memory)[1]
    values = [item.hex() if isinstance(item, bytes) else item for item in (arguments[place] for place in _DESCRIBED)]
    return {"gpu": gpu_uuid(), "num_bytes": memory.numel(), "values": values}


def release(record: dict[str, JSON]) -> None:
    """Give up the reference that torch keeps for the reader of a described vector, as no reader has opened it."""
    known = dict(zip(_DESCRIBED, record["values"], strict=True))
    torch.storage.TypedStorage._release_ipc_counter(
        bytes.fromhex(known[_REFERENCES]),
        known[_REFERENCES + 1],
        device=torch.device("cuda", torch.cuda.current_device()),
    )


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
    """A joined transfer group in which no byte is sent: the receivers read the senders' memory.

    Args:
        control: the group of trainer rank 0 and the engine ranks.
        share: on trainer rank 0: its end of the trainer ranks' rounds.
    """

    refills = True
    """A received buffer is the sender's, who fills it again once it is confirmed."""

    def __init__(self, control: GlooGroup, share: Share | None) -> None:
        self.rank, self.address = control.rank, control.address
        self._control, self._share = control, share
        self._ring: Ring | None = None
        self._open: OpenRing | None = None
        self._offered = 0

    def begin(self, plan: ChunkPlan) -> Agreement:
        """See `GlooGroup.begin`; then every engine rank opens the ring of the trainer rank on its GPU.

        Raises:
            ContractError: an engine rank has none there, which every member is told alike; or a trainer rank stopped.
        """
        self.end()
        agreement = self._control.begin(plan)
        if agreement.reached:
            if self._share is not None:
                self._lend(Ring(plan), self._share)
            else:
                rings = self._hand_over(None)
                here = gpu_uuid()
                self._readers(rings, f"{FOUND if here in rings else ABSENT}{here}")
                self._open = OpenRing(rings[here])
        return agreement

    def agree(self, word: str) -> Agreement:
        """See `GlooGroup.agree`."""
        return self._control.agree(word)

    def propose(self, word: str) -> Callable[[], Agreement]:
        """See `ControlChannel.propose`."""
        return self._control.propose(word)

    def place(self, num_bytes: int) -> torch.Tensor | None:
        """Where the sender packs its next chunk: in the next slot of its ring."""
        return self._ring.place(num_bytes) if self._ring is not None else None

    def offer(self, word: str, buffer: torch.Tensor, what: str) -> Callable[[], Agreement]:
        """The sender's side of a chunk: all trainer ranks have packed it; start to agree that it is read next.

        Raises:
            ContractError: another trainer rank stopped.
        """
        if self._ring is None or self._share is None:
            raise ContractError(f"transfer rank {self.rank} has no ring to offer {what} from")
        self._ring.fill(self._offered)
        self._offered += 1
        self._share.show({})
        return self.propose(word)

    def post(self, chunk: Chunk, what: str) -> Callable[[], torch.Tensor]:
        """See `GlooGroup.post`: the bytes are the sender's own, and this GPU's current stream waits for them."""
        ring = self._open
        if ring is None:
            raise ContractError(f"transfer rank {self.rank} has no ring open to read {what} from")
        return lambda: ring.read(chunk)

    def end(self) -> None:
        """Let go of the ring."""
        self._ring = self._open = None

    def close(self) -> None:
        """Leave the group."""
        self.end()
        self._control.close()

    def _lend(self, ring: Ring, share: Share) -> None:
        """Describe all trainer ranks' rings to the engine ranks, and tell those ranks which of them are read."""
        read: list[int] = []
        try:
            rings = self._hand_over(share.show(ring.describe()))
            read = [rings[gpu]["rank"] for gpu in self._readers(rings, "")]
        finally:
            if self.rank not in read:
                ring.unread()
        share.show({"read": read})
        self._ring, self._offered = ring, 0

    def _hand_over(self, rows: list[dict[str, JSON]] | None) -> dict[str, dict[str, JSON]]:
        """The description of one ring on each GPU, from the sender to all."""
        rings = {row["gpu"]: {**row, "rank": rank} for rank, row in reversed(list(enumerate(rows or [])))}
        text = torch.frombuffer(bytearray(json.dumps(rings).encode()), dtype=torch.uint8)
        size = torch.tensor([text.numel()], device="cpu")
        self._control.broadcast(size.view(torch.uint8), "the size of the rings' handles")()
        if rows is None:
            text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._control.broadcast(text, "the rings' handles")()
        return json.loads(bytes(text.numpy()))

    def _readers(self, rings: dict[str, dict[str, JSON]], word: str) -> list[str]:
        """Hear from every engine rank whether it has a ring to open, and on which GPU."""
        said = self._control.agree(word).said[1:]
        for rank, text in enumerate(said):
            if text.startswith(ABSENT):
                raise ContractError(
                    f"engine rank {rank} runs on GPU {text.removeprefix(ABSENT)} and was given no buffer there: the "
                    f"trainer shares buffers on {', '.join(sorted(rings))}"
                )
        return [text.removeprefix(FOUND) for text in said]
