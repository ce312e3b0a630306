"""The sender's side of one weight update: agree on the plan, send chunk by chunk, take the receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from verifier.engine.client import EngineClient, Pending, agreements, receipts
from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.buffer import pack
from verifier.transport.wire import Agreement, Receipt, TransferFailed, chunk_word

if TYPE_CHECKING:
    import torch

    from verifier.transport.gloo import Listener
    from verifier.transport.groups import Group, Show


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


def connect(engine: EngineClient, listener: Listener, show: Show | None = None) -> Group:
    """Bring the engine's ranks into the sender's transfer group; once, before the first update.

    Args:
        engine: the receivers' host.
        listener: says by its kind how bytes will move.
        show: for CUDA IPC, see `IpcGroup`.
    """
    from verifier.transport.groups import over

    pending = engine.connect(listener.address)
    group = over(_while_engine(pending, listener.accept), show)
    pending.result()
    return group


def agree(engine: EngineClient, group: Group, plan: ChunkPlan) -> Agreement:
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
    engine: EngineClient, group: Group, plan: ChunkPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[Delivery]:
    """Send the stream chunk by chunk; call `EngineClient.finish_update` when it is exhausted.

    Holds two chunks at a time: the next one is packed while the engine confirms and loads this one.

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
    problem: ContractError | None = None
    following = _pack_next(plan.chunks[0], stream)
    for chunk in plan.chunks:
        buffer = following
        pending = engine.receive(chunk.index)
        _while_engine(pending, partial(_send, group, plan, chunk, buffer))
        try:
            following = _pack_next(plan.chunks[chunk.index + 1], stream) if chunk is not plan.chunks[-1] else buffer
        except ContractError as refusal:
            problem = refusal
        yield Delivery(chunk=chunk, buffer=buffer, receipts=tuple(receipts(pending.result())))
        if problem is not None:
            raise problem
    if (extra := next(stream, None)) is not None:
        raise ContractError(f"the stream brings `{extra[0]}` after the plan's end")


def _pack_next(chunk: Chunk, stream: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Draw as many tensors as the chunk plans, then compare: all ranks draw alike, whatever is wrong with a name."""
    drawn = list(islice(stream, len(chunk.entries)))
    for place, entry in enumerate(chunk.entries):
        name = drawn[place][0] if place < len(drawn) else None
        if name != entry.tensor.name:
            what = f"`{name}`" if name else "nothing more"
            raise ContractError(f"the stream brings {what} where the plan says `{entry.tensor.name}`")
    return pack(chunk, dict(drawn))


def _send(group: Group, plan: ChunkPlan, chunk: Chunk, buffer: torch.Tensor) -> None:
    if group.agree(chunk_word(plan.digest, chunk.index)).reached:
        group.send(buffer, f"chunk {chunk.index} of {len(plan.chunks)}")


def _while_engine[T](pending: Pending, act: Callable[[], T]) -> T:
    """Do the sender's part of a step; if the engine's part failed, its own error says why."""
    try:
        return act()
    except TransferFailed:
        pending.result()
        raise
