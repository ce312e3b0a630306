"""The receiver's side of an update, the same in every engine: agree, receive, digest, load, confirm."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.plan.digest import Digests, Pieces, digest_tensors
from verifier.transport.buffer import pieces_of, unpack
from verifier.transport.gloo import join
from verifier.transport.groups import over
from verifier.transport.wire import (
    AHEAD,
    Address,
    Agreement,
    Receipt,
    TransferFailed,
    chunk_word,
    dissent,
)

if TYPE_CHECKING:
    from verifier.transport.groups import Group

Load = Callable[[list[tuple[str, torch.Tensor]]], Iterable[str]]
"""Loads tensors under their checkpoint names; returns the engine's names of what it loaded."""
LetGo = Callable[[torch.Tensor], None]
"""Gives whoever still holds a view of this buffer a copy of its own."""
LOAD_ERRORS = (ContractError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, AssertionError)
"""What weight loaders raise at a tensor that does not fit; none of them ends the engine."""


class ChunkReceiver:
    """One engine rank's end of the transfer.

    While a chunk is digested and loaded the next one is on its way: all members have agreed on it before. The one after
    that is said meanwhile, and let come once the loader has returned: `AHEAD` + 1 buffers are held.

    Args:
        engine_rank: from 0; the rank in the transfer group is one more.
        let_go: asked after every load out of memory that the sender will fill again; None for an engine whose loader
            holds nothing.
    """

    def __init__(self, engine_rank: int, let_go: LetGo | None = None) -> None:
        self.engine_rank = engine_rank
        self.plan: ChunkPlan | None = None
        self._let_go = let_go
        self._group: Group | None = None
        self._next = 0
        self._posted: deque[tuple[int, Callable[[], torch.Tensor]]] = deque()
        self._said: Callable[[], Agreement] | None = None
        self._stopped = ""
        self._pieces: dict[int, Pieces] = {}

    def connect(self, address: Address) -> None:
        """Join the sender's group, leaving an earlier one."""
        self.close()
        self._group = over(join(address, self.engine_rank + 1))

    def agree(self, plan: ChunkPlan) -> Agreement:
        """Say this rank's plan digest and hear everyone's; the plan is kept only if all agree.

        What an earlier update left under way is dropped.

        Raises:
            ContractError: the bytes cannot reach every engine rank; each raises the same.
        """
        known, self.plan = self.plan, None
        self._posted.clear()
        self._said = None
        agreement = self._joined().begin(plan)
        if agreement.reached:
            if known is None or known.digest != plan.digest:
                self._pieces = {}
            self.plan, self._next, self._stopped = plan, 0, ""
        return agreement

    def receive(self, chunk: int, load: Load) -> Receipt:
        """Take one chunk of the agreed plan, confirm what came, and load it.

        The digests are of the received tensors, by the names that the loader is given them under, and taken before it
        sees them. Nothing is judged here; what the loader raises is in the receipt.

        Args:
            chunk: index in the plan; chunks come in order.
            load: called once, with views of the received buffer.

        Returns:
            What came and what the loader reported; `refused` says if the members were not all at this chunk, or why
            the loader failed.

        Raises:
            ContractError: no agreed plan, or no such chunk in it.
            TransferFailed: a member did not arrive before the deadline.
        """
        if self.plan is None:
            raise ContractError(f"chunk {chunk} was announced before a chunk plan was agreed on")
        if not 0 <= chunk < len(self.plan.chunks):
            raise ContractError(f"chunk {chunk} was announced, the agreed plan has {len(self.plan.chunks)} chunks")
        self._say_through(self.plan, chunk)
        if not self._posted or self._posted[0][0] != chunk:
            self._hear(self.plan)
        if not self._posted or self._posted[0][0] != chunk:
            why = self._stopped or f"engine rank {self.engine_rank} was asked for a chunk that was not its next"
            return Receipt(
                rank=self.engine_rank, chunk=chunk, names=(), dtypes=(), shapes=(), digests=(), loaded=(), refused=why
            )
        layout, arrived = self.plan.chunks[chunk], self._posted.popleft()[1]
        what = f"chunk {chunk} of {len(self.plan.chunks)}"
        buffer = arrived()
        users = _users(buffer)
        started = self._start_digests(layout, buffer)
        digested = _mark(buffer)
        views = unpack(layout, buffer)
        names = tuple(name for name, _ in views)
        digests = started or Digests(digest_tensors(tensor for _, tensor in views))
        loaded, refused = self._load(buffer, views, load, users)
        self._hear(self.plan)
        is_last = chunk == len(self.plan.chunks) - 1
        # Only of memory that is filled again must the load be over, too; its kernels run on behind the receipt.
        self._settle(_mark(buffer) if is_last or self._joined().refills else digested, what)
        if is_last:
            self._joined().end()
        return Receipt(
            rank=self.engine_rank, chunk=chunk, names=names, dtypes=layout.dtypes, shapes=layout.shapes,
            digests=tuple(digests.result()), loaded=loaded, refused=refused,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the transfer group, if joined."""
        self._posted.clear()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _say_through(self, plan: ChunkPlan, chunk: int) -> None:
        """Say this chunk and the `AHEAD` ones after it, as far as not done; all but the last are also let come."""
        in_turn = self._posted[0][0] if self._posted else self._next
        while not self._stopped and self._next <= min(in_turn + AHEAD, len(plan.chunks) - 1):
            self._hear(plan)
            if self._stopped:
                return
            word = chunk_word(plan.digest, self._next) if chunk == in_turn else f"asked for chunk {chunk}"
            self._said = self._joined().propose(word)
            self._next += 1

    def _hear(self, plan: ChunkPlan) -> None:
        """If a chunk was said and not heard of: once all members have said it, let it come."""
        if self._said is None:
            return
        heard, self._said = self._said, None
        step = heard()
        if not step.reached:
            self._stopped = dissent(step)
            return
        index = self._next - 1
        arrived = self._joined().post(plan.chunks[index], f"chunk {index} of {len(plan.chunks)}")
        self._posted.append((index, arrived))

    def _start_digests(self, layout: Chunk, buffer: torch.Tensor) -> Digests | None:
        """On a GPU, of the planned ranges of the buffer, by a table that is made once; on the host None."""
        if not buffer.is_cuda:
            return None
        if layout.index not in self._pieces:
            self._pieces[layout.index] = pieces_of(layout)
        return self._pieces[layout.index].start(buffer)

    def _load(
        self, buffer: torch.Tensor, views: list[tuple[str, torch.Tensor]], load: Load, users: int
    ) -> tuple[tuple[str, ...], str | None]:
        """Names that the loader reported, and why it failed, if so; the views are gone then, if the loader kept none.

        Args:
            buffer: the chunk's.
            views: of the buffer, for the loader.
            load: the loader.
            users: of the buffer's memory, before there were views.
        """
        loaded: tuple[str, ...] = ()
        refused: str | None = None
        try:
            loaded = tuple(sorted(load(list(views))))
        except LOAD_ERRORS as error:
            refused = f"{type(error).__name__} while loading: {error}"
        views.clear()
        if self._joined().refills:
            if self._let_go is not None:
                self._let_go(buffer)
            if refused is None and _users(buffer) > users:
                refused = "the loader keeps views of a buffer that the sender will fill again"
        return loaded, refused

    def _settle(self, mark: torch.cuda.Event | None, what: str) -> None:
        """Wait until a GPU's stream has come past the mark."""
        if mark is None:
            return
        deadline_s = self._joined().address.deadline_s
        deadline = time.monotonic() + deadline_s
        late = f"engine rank {self.engine_rank} waited up to {deadline_s:g} s for {what} to arrive and be loaded"
        try:
            while not mark.query():
                if time.monotonic() > deadline:
                    raise TransferFailed(late)
        except RuntimeError as error:
            raise TransferFailed(f"{late}: {str(error).splitlines()[0]}") from error

    def _joined(self) -> Group:
        if self._group is None:
            raise ContractError("an update was announced before the engine joined a transfer group")
        return self._group


def _mark(buffer: torch.Tensor) -> torch.cuda.Event | None:
    """Of how far the GPU's stream has been asked to go by now; None for memory of the host."""
    if not buffer.is_cuda:
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def _users(buffer: torch.Tensor) -> int:
    """How many tensors lie in the buffer's memory, itself among them."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
