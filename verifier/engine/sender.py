"""Sender's side of one weight update: agree on the plan, send chunk by chunk, collect the receipts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Literal

from verifier.engine.api import TransferWatch
from verifier.engine.client import EngineClient
from verifier.errors import ContractError, VerifierError
from verifier.launch.child import in_thread
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.buffer import Packed, pack
from verifier.transport.wire import AHEAD, STOPPED, Agreement, Receipt, TransferFailed, chunk_message, disagreement

if TYPE_CHECKING:
    import torch

    from verifier.transport.cuda_ipc import TrainerRounds
    from verifier.transport.gloo import Listener
    from verifier.transport.group import TransferGroup


_GLANCE_S = 0.02
"""Seconds between two looks at whether the group is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One chunk as sent and as confirmed by every engine rank; later chunks overwrite its memory."""

    packed: Packed
    receipts: list[Receipt]


Running = Literal["none", "recomputed", "kept"]
"""Keys and values of requests that run during an update; "none": no request runs."""


def transfer(
    engine: EngineClient,
    group: TransferGroup,
    plan: ChunkPlan,
    tensors: Iterator[tuple[str, torch.Tensor]],
    watch: TransferWatch,
    rounds: TrainerRounds | None = None,
    running: Running = "none",
) -> str:
    """Agree on the plan, send every chunk, finish the update, and drop cached prefixes.

    A stream that departs from the plan, plans that differ, and a prefix cache that stays, end the transfer. Requests
    that run and keep their keys hold the cache, which is then to be dropped after their end. Returns why it was
    refused, with the stream as far drawn as it was; empty if it was not.
    """
    if rounds is not None:
        rounds.begin()
    try:
        agree(engine, group, plan, watch)
        for delivery in deliver(engine, group, plan, _shown(tensors, watch)):
            watch.delivered(delivery)
        if rounds is not None:
            rounds.end()
        engine.finish_update(watch.version)
        if not engine.reset_prefix_cache(running == "recomputed") and running != "kept":
            raise ContractError("the engine did not drop its prefix cache, which holds keys of the old weights")
    except ContractError as problem:
        if rounds is not None:
            rounds.stop()
        return str(problem)
    return ""


def _shown(tensors: Iterator[tuple[str, torch.Tensor]], watch: TransferWatch) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        watch.drawn(name, tensor)
        yield name, tensor


def connect(engine: EngineClient, listener: Listener, rounds: TrainerRounds | None = None) -> TransferGroup:
    """Connect the engine's ranks to the sender, once, by the kind of the listener's address; `rounds` for CUDA IPC."""
    from verifier.transport.groups import bulk_group

    answer = engine.connect(listener.address)
    with _engine_first(answer):
        joined = in_thread(listener.accept, "accept")  # it ends by the listener's deadline if the engine has died
        while not joined.done() and not engine.speaks(_GLANCE_S):
            pass
        if not joined.done():  # it has joined first, or it failed or died, and nobody else ends the wait for it
            answer()
            answer = _nothing
        control = joined.result()
    group = bulk_group(control, rounds)
    answer()
    return group


def _nothing() -> None:
    """Stand for an answer that was taken."""


def agree(engine: EngineClient, group: TransferGroup, plan: ChunkPlan, watch: TransferWatch | None = None) -> None:
    """Open an update: compare the plan digests of all members before any byte is sent.

    Raises:
        ContractError: the digests differ, or the bytes cannot reach every engine rank; the engine is unchanged.
    """
    answer = engine.begin_update(plan)
    with _engine_first(answer):
        agreement = group.begin(plan)
    answer()
    if watch is not None:
        watch.agreed(agreement)
    if not agreement.reached:
        ranks = ", ".join(str(rank - 1) for rank in agreement.dissenters)
        raise ContractError(f"engine rank {ranks} has another chunk plan than the sender, so no byte was sent")


def deliver(
    engine: EngineClient, group: TransferGroup, plan: ChunkPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[Delivery]:
    """Send (checkpoint name, tensor) in the order of the agreed plan; then call `EngineClient.finish_update`.

    While the engine loads a chunk, the next `AHEAD` chunks are being sent or agreed on, and one more is packed. If the
    group does not overwrite memory, the engine has the next request already. `AHEAD` + 1 chunks are in memory, and the
    one that was yielded last.

    Raises:
        ContractError: the stream departs from the plan, or the members are not all at the same chunk; every sent chunk
            has been confirmed by then.
        TransferFailed: a member did not arrive before the deadline.
    """
    sending = _Sending(engine, group, plan, iter(tensors))
    sending.pack_next()
    sending.raise_problem()
    sending.ask()
    follows = True
    while follows:
        sending.send()
        sending.pack_next()
        follows = len(sending.in_transfer) > 1
        if follows and not group.refills:  # the engine goes on with it at once
            sending.ask()
        receipts = sending.answer()
        packed = sending.in_transfer.popleft()
        group.confirmed()
        if follows and group.refills:
            sending.ask()
        try:
            yield Delivery(packed=packed, receipts=receipts)
        except GeneratorExit:  # the engine's pending answer must not be taken for that of a later request
            if follows:
                sending.send()
                sending.answer()
            raise
    sending.raise_problem()
    if (extra := next(sending.stream, None)) is not None:
        raise ContractError(f"the stream brings `{extra[0]}` after the plan's end")
    group.end()


class _Sending:
    """State of one update: chunks from the stream to the group.

    Attributes:
        stream: tensors that have not been drawn.
        in_transfer: chunks that are offered and not confirmed; a refused chunk is the last.
    """

    def __init__(
        self, engine: EngineClient, group: TransferGroup, plan: ChunkPlan, stream: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self.stream = stream
        self.in_transfer: deque[Packed] = deque()
        self._engine, self._group, self._plan = engine, group, plan
        self._problem: ContractError | None = None
        self._unpacked = iter(plan.chunks)
        self._ready: deque[Packed] = deque()
        self._asked: deque[Callable[[], list[Receipt]]] = deque()
        self._num_offered = self._num_asked = 0
        self._offered: tuple[Packed, Callable[[], Agreement]] | None = None
        self._stopped = False

    def raise_problem(self) -> None:
        """Raise the reason why no further chunk is offered, if there is one."""
        if self._problem is not None:
            raise self._problem

    def pack_next(self) -> None:
        """Draw the next chunk's tensors, compare them with the plan and pack; ranks draw in lockstep even on errors."""
        chunk = next(self._unpacked, None) if self._problem is None else None
        if chunk is None:
            return
        drawn = list(islice(self.stream, len(chunk.names)))
        try:
            if (names := tuple([name for name, _ in drawn])) != chunk.names:
                pairs = zip_longest(names, chunk.names)
                name, planned = next((name, planned) for name, planned in pairs if name != planned)
                what = f"`{name}`" if name else "nothing more"
                raise ContractError(f"the stream brings {what} where the plan says `{planned}`")
            self._ready.append(pack(chunk, dict(drawn), self._group.place(chunk.num_bytes)))
        except ContractError as problem:
            self._problem = problem

    def ask(self) -> None:
        """Ask the engine for the next chunk and offer chunks up to `AHEAD` later; the last one is not sent yet."""
        last = min(self._num_asked + AHEAD, len(self._plan.chunks) - 1)
        self._asked.append(self._engine.receive(self._num_asked))
        self._num_asked += 1
        with _engine_first(self._answer_all):
            while not self._stopped and self._num_offered <= last:
                self._send_offered()
                if not self._stopped and not self._offer_next():
                    self._stopped = True
                    self._group.agree(STOPPED)

    def send(self) -> None:
        """Send the chunk that was offered last, once the engine has agreed on it."""
        with _engine_first(self._answer_all):
            self._send_offered()

    def answer(self) -> list[Receipt]:
        """Return the engine's answer about the oldest requested chunk; after an error, drain the other answers."""
        try:
            return self._asked.popleft()()
        except VerifierError:
            while self._asked:
                with contextlib.suppress(VerifierError):
                    self._asked.popleft()()
            raise

    def _answer_all(self) -> None:
        while self._asked:
            self.answer()

    def _offer_next(self) -> bool:
        """Start to offer the next chunk; False if the stream or the group has none."""
        if not self._ready:
            self.pack_next()
        if not self._ready:
            return False
        packed = self._ready.popleft()
        message = chunk_message(self._plan.digest, packed.chunk.index)
        try:
            self._offered = packed, self._group.offer(message, packed.buffer, self._named(packed))
        except ContractError as problem:
            self._problem = problem
            return False
        self._num_offered += 1
        return True

    def _send_offered(self) -> None:
        if self._offered is None:
            return
        (packed, send), self._offered = self._offered, None
        agreement = send()
        self.in_transfer.append(packed)
        if not agreement.reached:
            self._stopped = True
            self._problem = ContractError(f"{self._named(packed)} was refused: {disagreement(agreement)}")

    def _named(self, packed: Packed) -> str:
        return f"chunk {packed.chunk.index} of {len(self._plan.chunks)}"


@contextlib.contextmanager
def _engine_first(answer: Callable[[], object]) -> Iterator[None]:
    """If the sender's part of a step fails, raise the engine's own error, if it has one."""
    try:
        yield
    except (TransferFailed, ContractError):
        answer()
        raise
