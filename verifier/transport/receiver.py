"""The receiver's side of an update, the same in every engine: agree, receive, digest, load, confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import digest_tensors
from verifier.transport.buffer import dtype_name, unpack
from verifier.transport.gloo import join
from verifier.transport.groups import over
from verifier.transport.wire import Address, Agreement, Receipt, Received, chunk_word

if TYPE_CHECKING:
    from verifier.transport.groups import Group

Load = Callable[[list[tuple[str, torch.Tensor]]], Iterable[str]]
"""Loads tensors under their checkpoint names; returns the engine's names of what it loaded."""
LOAD_ERRORS = (ContractError, RuntimeError, ValueError, LookupError, AttributeError, TypeError, AssertionError)
"""What weight loaders raise at a tensor that does not fit; none of them ends the engine."""


class ChunkReceiver:
    """One engine rank's end of the transfer.

    Args:
        engine_rank: from 0; the rank in the transfer group is one more.
    """

    def __init__(self, engine_rank: int) -> None:
        self.engine_rank = engine_rank
        self.plan: ChunkPlan | None = None
        self._group: Group | None = None

    def connect(self, address: Address) -> None:
        """Join the sender's group, leaving an earlier one."""
        self.close()
        self._group = over(join(address, self.engine_rank + 1))

    def agree(self, plan: ChunkPlan) -> Agreement:
        """Say this rank's plan digest and hear everyone's; the plan is kept only if all agree."""
        agreement = self._joined().agree(plan.digest)
        self.plan = plan if agreement.reached else None
        return agreement

    def receive(self, chunk: int, load: Load) -> Receipt:
        """Take one chunk of the agreed plan, confirm what came, and load it.

        The digests are of the received bytes, taken before the loader sees them. Nothing is judged here; what the
        loader raises is in the receipt.

        Args:
            chunk: index in the plan.
            load: called once, with views of a buffer that is never refilled.

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
        group, layout = self._joined(), self.plan.chunks[chunk]
        step = group.agree(chunk_word(self.plan.digest, chunk))
        if not step.reached:
            refused = f"transfer ranks {list(step.dissenters)} are at another chunk than the sender"
            return Receipt(rank=self.engine_rank, chunk=chunk, received=(), loaded=(), refused=refused)
        tensors = unpack(layout, group.receive(layout.num_bytes, f"chunk {chunk} of {len(self.plan.chunks)}"))
        digests = digest_tensors(tensor for _, tensor in tensors)
        received = tuple(
            Received(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), digest=digest)
            for (name, tensor), digest in zip(tensors, digests, strict=True)
        )
        loaded, refused = (), None
        try:
            loaded = tuple(sorted(load(tensors)))
        except LOAD_ERRORS as error:
            refused = f"{type(error).__name__} while loading: {error}"
        return Receipt(rank=self.engine_rank, chunk=chunk, received=received, loaded=loaded, refused=refused)

    def close(self) -> None:
        """Leave the transfer group, if joined."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _joined(self) -> Group:
        if self._group is None:
            raise ContractError("an update was announced before the engine joined a transfer group")
        return self._group
