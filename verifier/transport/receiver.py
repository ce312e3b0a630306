"""Receiver's side of an update, the same in every engine: agree, receive, digest, load, confirm."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.plan.digest import Digests, digest_tensors
from verifier.transport.buffer import unpack
from verifier.transport.gloo import join
from verifier.transport.group import TransferGroup
from verifier.transport.groups import bulk_group
from verifier.transport.wire import AHEAD, Address, Agreement, Receipt, TransferFailed, chunk_message, disagreement

Load = Callable[[list[tuple[str, torch.Tensor]]], Iterable[str]]
"""Loader of (checkpoint name, tensor) pairs; returns the engine's names of the loaded parameters."""
CopyViews = Callable[[torch.Tensor], None]
"""Replaces every view of a buffer that the loader still keeps by a copy."""
LOAD_ERRORS = (ContractError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, AssertionError)
"""Errors that weight loaders raise for a tensor that does not fit; they do not end the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A chunk's bytes, and what is known of them before the loader sees them."""

    buffer: torch.Tensor
    """[chunk.num_bytes] uint8; on a GPU the current stream has waited for them."""
    digests: Digests | None
    """Digests of the planned ranges; None if the received tensors are digested instead."""
    digested: torch.cuda.Event | None
    """End of the digests on the GPU's stream; None on the host."""


class ChunkReceiver:
    """One engine rank's end of the transfer.

    While one chunk is loaded, the next ones are in transfer: all members have agreed on them. One more is proposed
    meanwhile and posted once the loader has returned. At most `AHEAD` + 1 buffers exist.

    What arrives in memory of the receiver's own is digested right before it is loaded. What is read in place from the
    sender's memory (`TransferGroup.refills`) lies there, whole, once all have agreed on it: it is digested one chunk
    early, behind the load of the chunk before, so that the GPU digests while the receipt and the next request travel.
    Bytes that change between their digest and their load are not in the digest; ENG001 compares what the engine holds
    after the load with what was exported.

    Args:
        own_rank: rank in its engine, from 0.
        copy_views: called after every load from memory that the sender will overwrite; None for a loader that keeps no
            views.

    Attributes:
        engine_rank: rank among those of all engines in the group; the rank in the group is one more.
    """

    def __init__(self, own_rank: int, copy_views: CopyViews | None = None) -> None:
        self._own_rank = self.engine_rank = own_rank
        self.plan: ChunkPlan | None = None
        self._copy_views = copy_views
        self._group: TransferGroup | None = None
        self._next = 0
        self._posted: deque[tuple[int, Callable[[], torch.Tensor]]] = deque()
        self._proposed: Callable[[], Agreement] | None = None
        self._stopped = ""
        self._early: _Arrival | None = None

    def connect(self, address: Address) -> None:
        """Join the sender's group and leave an earlier one."""
        self.close()
        self.engine_rank = address.first + self._own_rank
        self._group = bulk_group(join(address, self.engine_rank + 1))

    def agree(self, plan: ChunkPlan) -> Agreement:
        """Compare plan digests with all members and keep the plan if they agree; pending chunks are dropped.

        Raises:
            ContractError: the bytes cannot reach every engine rank; every rank raises it.
        """
        known, self.plan = self.plan, None
        self._drop_posted()
        self._proposed = None
        agreement = self._joined().begin(plan)
        if agreement.reached:
            same = known is not None and known.digest == plan.digest
            self.plan, self._next, self._stopped = known if same else plan, 0, ""
        return agreement

    def receive(self, chunk: int, load: Load) -> Receipt:
        """Receive, digest and load one chunk of the agreed plan.

        The digests are taken before the loader sees the tensors, by a GPU in the order of its stream. An error of the
        loader is returned in the receipt.

        Args:
            chunk: index in the plan; chunks come in order.
            load: loader; called once, with views of the received buffer.

        Returns:
            Received tensors and loaded names; `refused` if the members were not all at this chunk or the loader failed.

        Raises:
            ContractError: there is no agreed plan, or no such chunk in it.
            TransferFailed: a member did not arrive before the deadline.
        """
        if self.plan is None:
            raise ContractError(f"chunk {chunk} was announced before a chunk plan was agreed on")
        if not 0 <= chunk < len(self.plan.chunks):
            raise ContractError(f"chunk {chunk} was announced, the agreed plan has {len(self.plan.chunks)} chunks")
        self._propose_through(self.plan, chunk)
        if not self._posted or self._posted[0][0] != chunk:
            self._post_proposed(self.plan)
        if not self._posted or self._posted[0][0] != chunk:
            why = self._stopped or f"engine rank {self.engine_rank} was asked for a chunk that was not its next"
            return Receipt(rank=self.engine_rank, chunk=chunk, refused=why)
        layout, refills = self.plan.chunks[chunk], self._joined().refills
        what = f"chunk {chunk} of {len(self.plan.chunks)}"
        arrival = self._arrival(layout)
        self._posted.popleft()
        buffer, self._early = arrival.buffer, None
        users = _users(buffer)
        views = unpack(layout, buffer)
        names = tuple([name for name, _ in views])
        digests = arrival.digests or Digests(digest_tensors(tensor for _, tensor in views))
        loaded, refused = self._load(buffer, views, load, users)
        done = _recorded_event(buffer)
        self._post_proposed(self.plan)
        is_last = chunk == len(self.plan.chunks) - 1
        if refills and self._posted:
            self._early = self._arrival(self.plan.chunks[self._posted[0][0]])
        self._settle(arrival.digested, what)
        found = tuple(digests.result())  # the GPU is loading meanwhile
        # Only memory that the sender overwrites must be loaded before the receipt; other loads may still be running.
        self._settle(done if is_last or refills else None, what)
        if is_last:
            self._joined().end()
        return Receipt(
            rank=self.engine_rank, chunk=chunk, names=names, dtypes=layout.dtypes, shapes=layout.shapes,
            digests=found, loaded=loaded, refused=refused,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the transfer group, if joined."""
        self._drop_posted()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _propose_through(self, plan: ChunkPlan, chunk: int) -> None:
        """Propose this chunk and the next `AHEAD` ones that are not proposed yet; post all but the last."""
        in_turn = self._posted[0][0] if self._posted else self._next
        while not self._stopped and self._next <= min(in_turn + AHEAD, len(plan.chunks) - 1):
            self._post_proposed(plan)
            if self._stopped:
                return
            message = chunk_message(plan.digest, self._next) if chunk == in_turn else f"asked for chunk {chunk}"
            self._proposed = self._joined().propose(message)
            self._next += 1

    def _post_proposed(self, plan: ChunkPlan) -> None:
        """Wait for the agreement on the proposed chunk, if there is one, and post it if all agree."""
        if self._proposed is None:
            return
        received, self._proposed = self._proposed, None
        agreement = received()
        if not agreement.reached:
            self._stopped = disagreement(agreement)
            return
        index = self._next - 1
        arrived = self._joined().post(plan.chunks[index], f"chunk {index} of {len(plan.chunks)}")
        self._posted.append((index, arrived))

    def _drop_posted(self) -> None:
        """Drop what was posted and not received; torch closes the sender's memory only after the current stream."""
        self._posted.clear()
        self._early = None

    def _arrival(self, layout: Chunk) -> _Arrival:
        """Return the oldest posted chunk, whose digests are started now if they were not early."""
        if (early := self._early) is not None:
            if early.digested is not None:  # nothing to wait for, unless the engine has changed its stream
                torch.cuda.current_stream().wait_event(early.digested)
            return early
        buffer = self._posted[0][1]()
        digests = self._start_digests(layout, buffer)
        return _Arrival(buffer=buffer, digests=digests, digested=_recorded_event(buffer))

    def _start_digests(self, layout: Chunk, buffer: torch.Tensor) -> Digests | None:
        """Start to digest the planned ranges of a buffer, by a table that is made once.

        None for memory of its own on the host, where it costs no more to digest the tensors that the loader is given.
        """
        if not (buffer.is_cuda or self._joined().refills):
            return None
        return layout.pieces.start(buffer)

    def _load(
        self, buffer: torch.Tensor, views: list[tuple[str, torch.Tensor]], load: Load, users: int
    ) -> tuple[tuple[str, ...], str | None]:
        """Load, and return the loaded names and why the loader failed, if it did.

        `views` are cleared afterwards; `users` counts the tensors in the buffer's memory before they were made.
        """
        loaded: tuple[str, ...] = ()
        refused: str | None = None
        try:
            loaded = tuple(sorted(load(list(views))))
        except LOAD_ERRORS as error:
            refused = f"{type(error).__name__} while loading: {error}"
        views.clear()
        if self._joined().refills:
            if self._copy_views is not None:
                self._copy_views(buffer)
            if refused is None and _users(buffer) > users:
                refused = "the loader keeps views of a buffer that the sender will overwrite"
        return loaded, refused

    def _settle(self, event: torch.cuda.Event | None, what: str) -> None:
        if event is None:
            return
        deadline_s = self._joined().address.deadline_s
        deadline = time.monotonic() + deadline_s
        late = f"engine rank {self.engine_rank} waited up to {deadline_s:g} s for {what} to arrive and be loaded"
        try:
            while not event.query():
                if time.monotonic() > deadline:
                    raise TransferFailed(late)
        except RuntimeError as error:
            raise TransferFailed(f"{late}: {str(error).splitlines()[0]}") from error

    def _joined(self) -> TransferGroup:
        if self._group is None:
            raise ContractError("an update was announced before the engine joined a transfer group")
        return self._group


def _recorded_event(buffer: torch.Tensor) -> torch.cuda.Event | None:
    if not buffer.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _users(buffer: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
