"""Transfer group over CUDA IPC, for engines on the trainer's GPUs: each engine rank reads a trainer rank's memory.

Every trainer rank packs each chunk into a slot of its own ring. Once per update the rings are described, keyed by GPU
UUID, which does not depend on a process's numbering of GPUs. Engine ranks open the ring on their GPU before loading and
read it in place. If several trainer ranks are on one GPU, the first one's ring is read. A slot is overwritten only when
every engine rank has confirmed its chunk; a ring counts both and refuses.
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
from verifier.platform.gather_json import gather_json
from verifier.transport.buffer import pack
from verifier.transport.gloo import GlooGroup
from verifier.transport.group import TransferGroup
from verifier.transport.wire import AHEAD, Agreement

JSON = Any
SLOTS = AHEAD + 2
"""Number of slots of a ring: one being read, `AHEAD` in transfer, one being packed."""
FOUND, ABSENT = "found on ", "none on "
"""Start of an engine rank's message about the ring on its GPU; the GPU's UUID follows."""
_HANDLE, _REFERENCES, _EVENT = 7, 11, 13
"""Positions of the bytes fields in torch's description of a shared tensor."""
_DESCRIBED = (3, 7, 8, 9, 11, 12, 13, 14)
"""Positions that the receiver cannot know: offsets, sizes and handles."""


class TrainerRounds:
    """Collective rounds of all trainer ranks during one transfer.

    In each round every rank sends one record to all others, or that it stops. No round follows one in which a rank
    stopped.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._open = False

    def begin(self) -> None:
        """Open the rounds of one transfer; every rank calls it."""
        self._open = True

    def exchange(self, record: dict[str, JSON]) -> list[dict[str, JSON]]:
        """Run one round and return the records of all ranks.

        Raises:
            ContractError: another rank stopped.
        """
        rows = self._round(record)
        if rows is None:
            raise ContractError("a trainer rank stopped before the transfer was complete: its log says why")
        return rows

    def stop(self) -> None:
        """Tell the other ranks that no rounds follow, unless the rounds are closed."""
        if self._open:
            self._round(None)

    def end(self) -> None:
        """Run the last round; afterwards no rank reads what it received before."""
        if self._open:
            self._round({})
            self._open = False

    def _round(self, record: dict[str, JSON] | None) -> list[dict[str, JSON]] | None:
        rows = gather_json(record)
        if any(row is None for row in rows):
            self._open = False
            return None
        return rows


class Ring:
    """Send buffers of one trainer rank for one update: `SLOTS` slots in one allocation of its GPU.

    Attributes:
        num_confirmed: number of chunks that every engine rank has confirmed.
    """

    def __init__(self, plan: ChunkPlan) -> None:
        self._slot_bytes = max(chunk.num_bytes for chunk in plan.chunks)
        self._memory = allocate(SLOTS * self._slot_bytes)
        self._filled = [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)]
        self._num_placed = self.num_confirmed = 0
        self._description = {**describe(self._memory), "slot_bytes": self._slot_bytes}

    def place(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of the next slot.

        Raises:
            ContractError: an engine rank has not confirmed the slot's last chunk.
        """
        if self._num_placed - self.num_confirmed >= SLOTS:
            raise ContractError(
                f"chunk {self._num_placed} must not be packed yet: its slot holds chunk {self._num_placed - SLOTS}, "
                f"and {self.num_confirmed} chunks are confirmed"
            )
        begin = self._num_placed % SLOTS * self._slot_bytes
        self._num_placed += 1
        return self._memory[begin : begin + num_bytes]

    def fill(self, index: int) -> None:
        """Record on the current stream that the chunk with this index is packed."""
        self._filled[index % SLOTS].record()

    def describe(self) -> dict[str, JSON]:
        """Return what another process needs to open the ring on this GPU; the ring must outlive its readers."""
        return {**self._description, "filled": [event.ipc_handle().hex() for event in self._filled]}

    def release(self) -> None:
        """Drop the memory's reference for a reader, as no engine rank has opened the ring."""
        release(self._description)


class OpenRing:
    """A `Ring` of another process on this process's GPU."""

    def __init__(self, record: dict[str, JSON]) -> None:
        self._slot_bytes: int = record["slot_bytes"]
        self._memory = open_buffer(record)
        device = torch.device("cuda", torch.cuda.current_device())
        self._filled = [torch.cuda.Event.from_ipc_handle(device, bytes.fromhex(handle)) for handle in record["filled"]]

    def read(self, chunk: Chunk) -> torch.Tensor:
        """Return the chunk's bytes in place; the current stream waits until they are packed."""
        slot = chunk.index % SLOTS
        torch.cuda.current_stream().wait_event(self._filled[slot])
        return self._memory[slot * self._slot_bytes :][: chunk.num_bytes]


def follow(rounds: TrainerRounds, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Pack every chunk on a trainer rank other than 0, one round per chunk, and draw the whole stream in lockstep.

    A rank whose ring no engine rank reads packs nothing. Rank 0 joins the round of a chunk only once the slot that is
    packed next is free.
    """
    ring, is_read = Ring(plan), False
    rounds.begin()
    try:
        rounds.exchange(ring.describe())
        is_read = rounds.rank in rounds.exchange({})[0]["read"]
        for chunk in plan.chunks:
            drawn = dict(islice(stream, len(chunk.names)))
            if is_read:
                pack(chunk, drawn, ring.place(chunk.num_bytes))
                ring.fill(chunk.index)
            ring.num_confirmed = rounds.exchange({})[0]["confirmed"]
        rounds.end()
    except ContractError:
        rounds.stop()
    if not is_read:
        ring.release()
    for _ in stream:
        pass


def gpu_uuid() -> str:
    """Return the UUID of this process's current GPU."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def allocate(num_bytes: int) -> torch.Tensor:
    """Allocate memory of this process's GPU; memory that earlier readers have closed is reclaimed first."""
    torch.cuda.ipc_collect()
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def describe(memory: torch.Tensor) -> dict[str, JSON]:
    """Return what another process needs to open a uint8 vector on this process's GPU."""
    arguments = reduce_tensor(memory)[1]
    values = [item.hex() if isinstance(item, bytes) else item for item in (arguments[place] for place in _DESCRIBED)]
    return {"gpu": gpu_uuid(), "num_bytes": memory.numel(), "values": values}


def release(record: dict[str, JSON]) -> None:
    """Drop the reference that torch keeps for the reader of a described vector that no reader opened."""
    known = dict(zip(_DESCRIBED, record["values"], strict=True))
    torch.storage.TypedStorage._release_ipc_counter(
        bytes.fromhex(known[_REFERENCES]),
        known[_REFERENCES + 1],
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def open_buffer(record: dict[str, JSON]) -> torch.Tensor:
    """Open another process's memory as a uint8 vector [num_bytes], without a copy."""
    known = dict(zip(_DESCRIBED, record["values"], strict=True))
    for place in (_HANDLE, _REFERENCES, _EVENT):
        known[place] = bytes.fromhex(known[place])
    fixed = {
        0: torch.Tensor, 1: torch.Size([record["num_bytes"]]), 2: (1,), 4: torch.storage.TypedStorage, 5: torch.uint8,
        6: torch.cuda.current_device(), 10: False,
    }  # fmt: skip
    arguments = known | fixed
    return rebuild_cuda_tensor(*(arguments[place] for place in range(len(arguments))))


class IpcGroup(TransferGroup):
    """A joined transfer group in which no byte is sent: receivers read the memory of the senders' GPUs."""

    refills = True
    _control: GlooGroup

    def __init__(self, control: GlooGroup, rounds: TrainerRounds | None) -> None:
        self.rank, self.address = control.rank, control.address
        self._control, self._rounds = control, rounds
        self._ring: Ring | None = None
        self._open: OpenRing | None = None
        self._num_offered = 0

    def begin(self, plan: ChunkPlan) -> Agreement:
        """See `TransferGroup.begin`; then every engine rank opens the ring of the trainer rank on its GPU.

        Raises:
            ContractError: an engine rank has no trainer rank on its GPU, on every member; or a trainer rank stopped.
        """
        agreement = super().begin(plan)
        if agreement.reached:
            if self._rounds is not None:
                self._lend(Ring(plan), self._rounds)
            else:
                rings = self._distribute(None)
                here = gpu_uuid()
                self._readers(rings, f"{FOUND if here in rings else ABSENT}{here}")
                self._open = OpenRing(rings[here])
        return agreement

    def place(self, num_bytes: int) -> torch.Tensor | None:
        """Return the next slot of the sender's ring."""
        return self._ring.place(num_bytes) if self._ring is not None else None

    def confirmed(self) -> None:
        """Count a confirmed chunk; the other trainer ranks hear of it in their next round."""
        if self._ring is not None:
            self._ring.num_confirmed += 1

    def offer(self, message: str, buffer: torch.Tensor, what: str) -> Callable[[], Agreement]:
        """See `TransferGroup.offer`; waits until all trainer ranks have packed the chunk.

        Raises:
            ContractError: another trainer rank stopped.
        """
        if self._ring is None or self._rounds is None:
            raise ContractError(f"transfer rank {self.rank} has no ring to offer {what} from")
        self._ring.fill(self._num_offered)
        self._num_offered += 1
        self._rounds.exchange({"confirmed": self._ring.num_confirmed})
        return self.propose(message)

    def post(self, chunk: Chunk, what: str) -> Callable[[], torch.Tensor]:
        """See `TransferGroup.post`; the bytes stay in the sender's memory, and this GPU's current stream waits."""
        ring = self._open
        if ring is None:
            raise ContractError(f"transfer rank {self.rank} has no ring open to read {what} from")
        return lambda: ring.read(chunk)

    def end(self) -> None:
        """Release the ring."""
        self._ring = self._open = None

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self.end()
        self._control.close()

    def _lend(self, ring: Ring, rounds: TrainerRounds) -> None:
        """Send the descriptions of all trainer ranks' rings to the engine ranks, and report which of them are read."""
        read: list[int] = []
        try:
            rings = self._distribute(rounds.exchange(ring.describe()))
            read = [rings[gpu]["rank"] for gpu in self._readers(rings, "")]
        finally:
            if self.rank not in read:
                ring.release()
        rounds.exchange({"read": read})
        self._ring, self._num_offered = ring, 0

    def _distribute(self, rows: list[dict[str, JSON]] | None) -> dict[str, dict[str, JSON]]:
        """Send the description of one ring on each GPU from the sender (with `rows`) to all members."""
        rings = {row["gpu"]: {**row, "rank": rank} for rank, row in reversed(list(enumerate(rows or [])))}
        text = torch.frombuffer(bytearray(json.dumps(rings).encode()), dtype=torch.uint8)
        size = torch.tensor([text.numel()], device="cpu")
        self._control.broadcast(size.view(torch.uint8), "the size of the rings' handles")()
        if rows is None:
            text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._control.broadcast(text, "the rings' handles")()
        return json.loads(bytes(text.numpy()))

    def _readers(self, rings: dict[str, dict[str, JSON]], message: str) -> list[str]:
        messages = self._control.agree(message).messages[1:]
        for rank, text in enumerate(messages):
            if text.startswith(ABSENT):
                raise ContractError(
                    f"engine rank {rank} runs on GPU {text.removeprefix(ABSENT)} and was given no buffer there: the "
                    f"trainer shares buffers on {', '.join(sorted(rings))}"
                )
        return [text.removeprefix(FOUND) for text in messages]
