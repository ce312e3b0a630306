"""The sender's side of one weight update: agree on the plan, send chunk by chunk, take the receipts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from verifier.engine.client import EngineClient, Pending, agreements, receipts
from verifier.errors import ContractError, VerifierError
from verifier.plan.chunk_plan import Chunk, ChunkPlan
from verifier.transport.buffer import Packed, pack
from verifier.transport.wire import AHEAD, STOPPED, Agreement, Receipt, TransferFailed, chunk_word, dissent

if TYPE_CHECKING:
    import torch

    from verifier.transport.cuda_ipc import Share
    from verifier.transport.gloo import Listener
    from verifier.transport.groups import Group


class PlanRefused(ContractError):
    """Sender and engine ranks hold different plans, so no byte moved."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        ranks = ", ".join(str(rank - 1) for rank in agreement.dissenters)
        super().__init__(f"engine rank {ranks} holds another chunk plan than the sender, so no byte was sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One chunk as it was sent and as every engine rank confirmed it; its memory is used again for later ones."""

    chunk: Chunk
    packed: Packed
    receipts: tuple[Receipt, ...]

    @property
    def buffer(self) -> torch.Tensor:
        """[num_bytes] uint8, as sent."""
        return self.packed.buffer

    def digests(self) -> list[str]:
        """Of what was packed, in the plan's order."""
        return self.packed.digests()


def connect(engine: EngineClient, listener: Listener, share: Share | None = None) -> Group:
    """Bring the engine's ranks into the sender's transfer group; once, before the first update.

    Args:
        engine: the receivers' host.
        listener: says by its kind how bytes will move.
        share: for CUDA IPC, see `IpcGroup`.
    """
    from verifier.transport.groups import over

    pending = engine.connect(listener.address)
    group = over(_while_engine(pending.result, listener.accept), share)
    pending.result()
    return group


def agree(engine: EngineClient, group: Group, plan: ChunkPlan) -> Agreement:
    """Open an update: all members say their plan's digest, and only then may a byte move.

    Returns:
        What each member said.

    Raises:
        PlanRefused: they differ; the engine is as it was before.
        ContractError: the bytes cannot reach every engine rank; the engine is as it was before.
    """
    pending = engine.begin_update(plan)
    agreement = _while_engine(pending.result, lambda: group.begin(plan))
    agreements(pending.result())
    if not agreement.reached:
        raise PlanRefused(agreement)
    return agreement


def deliver(
    engine: EngineClient, group: Group, plan: ChunkPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[Delivery]:
    """Send the stream chunk by chunk; call `EngineClient.finish_update` when it is exhausted.

    While the engine confirms and loads a chunk, the next `AHEAD` are on their way to it or are being agreed on, the
    one after those is drawn and packed, and where no memory is filled again, the engine has been asked for the next.
    Holds these four, and the one that was handed out last.

    Args:
        engine: the receivers' host.
        group: as `connect` returned it.
        plan: as `agree` was asked about it.
        tensors: in the plan's order, checkpoint names.

    Raises:
        ContractError: the stream departs from the plan, or the members are not all at the same chunk; every chunk that
            was sent has been confirmed by then.
        TransferFailed: a member did not arrive before the deadline.
    """
    sending = _Sending(engine, group, plan, iter(tensors))
    sending.pack_next()
    if sending.problem is not None:
        raise sending.problem
    sending.ask()
    for chunk in plan.chunks:
        sending.send()
        sending.pack_next()
        follows = len(sending.on_their_way) > 1
        if follows and not group.refills:  # it finds the next request when it has done this one
            sending.ask()
        answer = sending.answer()
        packed = sending.on_their_way.popleft()
        if follows and group.refills:
            sending.ask()
        try:
            yield Delivery(chunk=chunk, packed=packed, receipts=tuple(receipts(answer)))
        except GeneratorExit:  # nobody wants the rest: the engine's answer is not left for the next request
            if follows:
                sending.send()
                sending.answer()
            raise
        if not follows:
            break
    if sending.problem is not None:
        raise sending.problem
    if (extra := next(sending.stream, None)) is not None:
        raise ContractError(f"the stream brings `{extra[0]}` after the plan's end")
    group.end()


class TransferWatch(Protocol):
    """Told of a transfer under way. It only looks."""

    def agreed(self, agreement: Agreement) -> None:
        """All members have said which plan they hold."""

    def delivered(self, delivery: Delivery) -> None:
        """Every engine rank has confirmed a chunk."""


def transfer(
    engine: EngineClient,
    group: Group,
    plan: ChunkPlan,
    tensors: Iterator[tuple[str, torch.Tensor]],
    watch: TransferWatch,
    share: Share | None = None,
) -> str:
    """Agree on the plan, send every chunk, finish the update, and drop cached prefixes.

    A stream that departs from the plan, and plans that differ, end the transfer.

    Returns:
        Why it was refused, with the stream as far drawn as it was; empty if it was not.
    """
    if share is not None:
        share.begin()
    try:
        try:
            watch.agreed(agree(engine, group, plan))
        except PlanRefused as problem:
            watch.agreed(problem.agreement)
            raise
        for delivery in deliver(engine, group, plan, tensors):
            watch.delivered(delivery)
        if share is not None:
            share.end()
        engine.finish_update()
        engine.reset_prefix_cache()
    except ContractError as problem:
        if share is not None:
            share.stop()
        return str(problem)
    return ""


class _Sending:
    """One update's chunks, from the stream into the group.

    Attributes:
        stream: what has not been drawn.
        problem: why no further chunk is offered, if so.
        on_their_way: offered, and not confirmed; at its end the one that was refused, if any.
    """

    def __init__(
        self, engine: EngineClient, group: Group, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self.stream = stream
        self.problem: ContractError | None = None
        self.on_their_way: deque[Packed] = deque()
        self._engine, self._group, self._plan = engine, group, plan
        self._ready: deque[Packed] = deque()
        self._asked: deque[Pending] = deque()
        self._num_packed = self._num_offered = self._num_asked = 0
        self._offered: tuple[Packed, Callable[[], Agreement]] | None = None
        self._stopped = False

    def pack_next(self) -> None:
        """Draw as many tensors as the next chunk plans, then compare: all ranks draw alike, whatever is wrong."""
        if self.problem is not None or self._num_packed == len(self._plan.chunks):
            return
        chunk = self._plan.chunks[self._num_packed]
        drawn = list(islice(self.stream, len(chunk.entries)))
        self._num_packed += 1
        try:
            for name, planned in zip_longest([name for name, _ in drawn], chunk.names):
                if name != planned:
                    what = f"`{name}`" if name else "nothing more"
                    raise ContractError(f"the stream brings {what} where the plan says `{planned}`")
            self._ready.append(pack(chunk, dict(drawn), self._group.place(chunk.num_bytes)))
        except ContractError as problem:
            self.problem = problem

    def ask(self) -> None:
        """Have the engine receive the next chunk, and offer it those up to `AHEAD` later; the last is not sent yet."""
        chunk = self._num_asked
        self._asked.append(self._engine.receive(chunk))
        self._num_asked += 1
        _while_engine(self._answer_all, partial(self._offer_through, min(chunk + AHEAD, len(self._plan.chunks) - 1)))

    def send(self) -> None:
        """Let go of the chunk that was offered last, once the engine has agreed on it."""
        _while_engine(self._answer_all, self._send_offered)

    def answer(self) -> Any:
        """What the engine says of the oldest chunk that it was asked for; after an error nothing more is awaited."""
        try:
            return self._asked.popleft().result()
        except VerifierError:
            while self._asked:
                with contextlib.suppress(VerifierError):
                    self._asked.popleft().result()
            raise

    def _answer_all(self) -> None:
        while self._asked:
            self.answer()

    def _offer_through(self, last: int) -> None:
        while not self._stopped and self._num_offered <= last:
            self._send_offered()
            if not self._stopped:
                self._offer_next()

    def _offer_next(self) -> None:
        if not self._ready:
            self.pack_next()
        if not self._ready:
            self._stop()
            return
        packed = self._ready.popleft()
        word = chunk_word(self._plan.digest, self._num_offered)
        what = self._named(self._num_offered)
        try:
            self._offered = packed, self._group.offer(word, packed.buffer, what)
        except ContractError as problem:
            self.problem = problem
            self._stop()
            return
        self._num_offered += 1

    def _send_offered(self) -> None:
        if self._offered is None:
            return
        (packed, send), self._offered = self._offered, None
        step = send()
        self.on_their_way.append(packed)
        if not step.reached:
            self._stopped = True
            self.problem = ContractError(f"{self._named(packed.chunk.index)} was refused: {dissent(step)}")

    def _named(self, chunk: int) -> str:
        return f"chunk {chunk} of {len(self._plan.chunks)}"

    def _stop(self) -> None:
        self._stopped = True
        self._group.agree(STOPPED)


def _while_engine[T](answer: Callable[[], Any], act: Callable[[], T]) -> T:
    """Do the sender's part of a step; if the engine's part failed, its own error says why."""
    try:
        return act()
    except (TransferFailed, ContractError):
        answer()
        raise
