"""The sender's side of one weight update: agree on the plan, send chunk by chunk, take the receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from verifier.engine.client import EngineClient, Pending, agreements, receipts
from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.buffer import pack
from verifier.transport.wire import Agreement, Receipt, TransferFailed, chunk_word

if TYPE_CHECKING:
    import torch

    from verifier.transport.gloo import GlooGroup, Listener


class PlanRefused(ContractError):
    """Sender and engine ranks hold different plans, so no byte moved."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        ranks = ", ".join(str(rank - 1) for rank in agreement.dissenters)
        super().__init__(f"engine rank {ranks} holds another chunk plan than the sender, so no byte was sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One chunk as it was sent and as every engine rank confirmed it."""

    chunk: Chunk
    buffer: torch.Tensor
    """[num_bytes] uint8, as sent."""
    receipts: tuple[Receipt, ...]


def connect(engine: EngineClient, listener: Listener) -> GlooGroup:
    """Bring the engine's ranks into the sender's transfer group; once, before the first update."""
    pending = engine.connect(listener.address)
    group = _while_engine(pending, listener.accept)
    pending.result()
    return group


def agree(engine: EngineClient, group: GlooGroup, plan: ChunkPlan) -> Agreement:
    """Open an update: all members say their plan's digest, and only then may a byte move.

    Returns:
        What each member said.

    Raises:
        PlanRefused: they differ; the engine is as it was before.
    """
    pending = engine.begin_update(plan)
    agreement = _while_engine(pending, lambda: group.agree(plan.digest))
    agreements(pending.result())
    if not agreement.reached:
        raise PlanRefused(agreement)
    return agreement


def deliver(
    engine: EngineClient, group: GlooGroup, plan: ChunkPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[Delivery]:
    """Send the stream chunk by chunk; call `EngineClient.finish_update` when it is exhausted.

    Holds one chunk at a time.

    Args:
        engine: the receivers' host.
        group: as `connect` returned it.
        plan: as `agree` was asked about it.
        tensors: in the plan's order, checkpoint names.

    Raises:
        ContractError: the stream departs from the plan.
        TransferFailed: a member did not arrive before the deadline.
    """
    stream = iter(tensors)
    for chunk in plan.chunks:
        held: dict[str, torch.Tensor] = {}
        for entry in chunk.entries:
            name, tensor = next(stream, (None, None))
            if name != entry.tensor.name:
                what = f"`{name}`" if name else "nothing more"
                raise ContractError(f"the stream brings {what} where the plan says `{entry.tensor.name}`")
            held[name] = tensor
        buffer = pack(chunk, held)
        pending = engine.receive(chunk.index)
        _while_engine(pending, partial(_send, group, plan, chunk, buffer))
        yield Delivery(chunk=chunk, buffer=buffer, receipts=tuple(receipts(pending.result())))
    if (extra := next(stream, None)) is not None:
        raise ContractError(f"the stream brings `{extra[0]}` after the plan's end")


def _send(group: GlooGroup, plan: ChunkPlan, chunk: Chunk, buffer: torch.Tensor) -> None:
    if group.agree(chunk_word(plan.digest, chunk.index)).reached:
        group.broadcast(buffer, f"chunk {chunk.index} of {len(plan.chunks)}")


def _while_engine[T](pending: Pending, act: Callable[[], T]) -> T:
    """Do the sender's part of a step; if the engine's part failed, its own error says why."""
    try:
        return act()
    except TransferFailed:
        pending.result()
        raise
