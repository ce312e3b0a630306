"""A sender and several engine ranks in one process, each rank on a thread of its own; the groups and words are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec
import torch

from verifier.engine import sender as update
from verifier.plan.chunk_plan import ChunkPlan, TensorMeta, build_plan
from verifier.plan.digest import dtype_name
from verifier.transport.gloo import Listener
from verifier.transport.receiver import ChunkReceiver
from verifier.transport.wire import Address, Receipt

DEADLINE_S = 20


class Answer:
    """One request under way on all ranks; the first rank that failed speaks for all."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self._futures = futures

    def done(self, within_s: float) -> bool:
        return not wait(self._futures, within_s).not_done

    def __call__(self) -> Any:
        return [future.result(DEADLINE_S + 10) for future in self._futures]


class Ranks:
    """The engine's end: one receiver per rank, each asked on its own thread, as `EngineClient` asks an engine."""

    def __init__(self, num_ranks: int, copy_views: Callable[[torch.Tensor], None] | None = None) -> None:
        self.receivers = [ChunkReceiver(rank, copy_views) for rank in range(num_ranks)]
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]
        self.load: Callable[[int, list[tuple[str, torch.Tensor]]], list[str]] = self.keep
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"engine rank {rank}") for rank in range(num_ranks)
        ]  # fmt: skip
        self.asked: Callable[[int, int], int] = lambda rank, chunk: chunk

    def keep(self, rank: int, tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
        """A loader that copies."""
        self.held[rank] |= {name: tensor.clone() for name, tensor in tensors}
        return [name for name, _ in tensors]

    def connect(self, address: Address) -> Answer:
        return self._ask(lambda receiver: receiver.connect(address))

    def speaks(self, within_s: float) -> bool:
        return self._last.done(within_s)

    def begin_update(self, plan: ChunkPlan) -> Answer:
        return self._ask(lambda receiver: receiver.agree(plan))

    def receive(self, chunk: int) -> Answer:
        return self._ask(lambda receiver: self._received(receiver, chunk))

    def _received(self, receiver: ChunkReceiver, chunk: int) -> Any:
        chunk = self.asked(receiver.engine_rank, chunk)
        receipt = receiver.receive(chunk, lambda tensors: self.load(receiver.engine_rank, tensors))
        return msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt)

    def close(self) -> None:
        for receiver, thread in zip(self.receivers, self._threads, strict=True):
            thread.submit(receiver.close).result(DEADLINE_S)
            thread.shutdown()

    def _ask(self, act: Callable[[ChunkReceiver], Any]) -> Answer:
        self._last = Answer(
            [t.submit(act, receiver) for t, receiver in zip(self._threads, self.receivers, strict=True)]
        )
        return self._last


class Sender:
    """The trainer's end, with tensors of several dtypes in chunks of a few hundred bytes."""

    def __init__(self, ranks: Ranks, kind: str = "gloo", rounds: Any = None, deadline_s: float = DEADLINE_S) -> None:
        self.ranks = ranks
        listener = Listener(len(ranks.receivers), deadline_s=deadline_s, kind=kind)
        self.group = update.connect(ranks, listener, rounds)

    def deliver(self, plan: ChunkPlan, tensors: dict[str, torch.Tensor]) -> Iterator[update.Delivery]:
        update.agree(self.ranks, self.group, plan)
        return update.deliver(self.ranks, self.group, plan, iter(tensors.items()))

    def send(self, version: int) -> list[update.Delivery]:
        """A whole update; every rank must confirm and hold every tensor, bit by bit."""
        tensors = weights(version)
        deliveries = []
        for delivery in self.deliver(plan_of(tensors), tensors):
            digests = delivery.packed.digests()
            for receipt in delivery.receipts:
                assert receipt.refused is None
                assert [item.digest for item in receipt.received] == digests
                assert [(item.name, item.dtype, item.shape) for item in receipt.received] == [
                    (meta.name, meta.dtype, meta.shape) for meta in delivery.packed.chunk.tensors
                ]
                assert list(receipt.loaded) == sorted(item.name for item in receipt.received)
            deliveries.append(delivery)
        for held in self.ranks.held:
            assert held.keys() == tensors.keys()
            assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
        return deliveries


def weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors that differ between versions, no two alike."""
    generator = torch.Generator().manual_seed(version)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.int64)
    return {
        f"layers.{index}.weight": torch.randint(-99, 99, (index % 5 + 1, 40), generator=generator).to(dtypes[index % 4])
        for index in range(24)
    }


def plan_of(tensors: dict[str, torch.Tensor], chunk_bytes: int = 1500) -> ChunkPlan:
    """A plan of several chunks with several tensors each."""
    plan = build_plan(
        [TensorMeta(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape)) for n, t in tensors.items()],
        chunk_bytes=chunk_bytes,
    )
    assert len(plan.chunks) > 5
    return plan
