"""What CUDA and torch.distributed do for the rings of CUDA IPC, in one process; see `test_cuda_ipc.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from tests.unit.transport.transfer_case import Sender, plan_of, weights
from verifier.errors import ContractError
from verifier.transport.cuda_ipc import follow

TRAINER_RANKS = 2


class Event:
    """Recorded when its slot was packed; whoever waits for one that was not has come too early."""

    known: ClassVar[dict[str, Event]] = {}

    def __init__(self, interprocess: bool) -> None:
        assert interprocess
        self.num_records = 0
        self.known[f"{id(self):016x}"] = self

    def record(self) -> None:
        self.num_records += 1

    def ipc_handle(self) -> bytes:
        return bytes.fromhex(f"{id(self):016x}")

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Event:
        return cls.known[handle.hex()]


class Stream:
    def wait_event(self, event: Event) -> None:
        assert event.num_records > 0


class TrainerRounds:
    """The rounds of `TRAINER_RANKS` threads."""

    rows: ClassVar[list[Any]] = [None] * TRAINER_RANKS
    barrier = threading.Barrier(TRAINER_RANKS, timeout=20)

    def __init__(self, rank: int) -> None:
        self.rank, self.ended = rank, False

    def begin(self) -> None:
        self.ended = False

    def exchange(self, record: Any) -> list[Any]:
        found = self._round(record)
        if any(row is None for row in found):
            self.ended = True
            raise ContractError("a trainer rank stopped before the transfer was complete: its log says why")
        return found

    def stop(self) -> None:
        if not self.ended:
            self._round(None)

    def end(self) -> None:
        self._round({})

    def _round(self, record: Any) -> list[Any]:
        self.rows[self.rank] = record
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


class Follower:
    """Trainer rank 1: draws the same stream and packs it beside rank 0."""

    def __init__(self, version: int, planned: int | None = None) -> None:
        self.rounds = TrainerRounds(1)
        self.drawn = 0
        tensors = weights(version)
        plan = plan_of(weights(version if planned is None else planned))
        self.thread = threading.Thread(
            target=lambda: follow(self.rounds, plan, self._counted(tensors)), name="trainer rank 1", daemon=True
        )
        self.thread.start()

    def _counted(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in tensors.items():
            self.drawn += 1
            yield item

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


def send(sender: Sender, rounds: TrainerRounds, version: int) -> None:
    rounds.begin()
    follower = Follower(version)
    sender.send(version)
    rounds.end()
    follower.join()
    assert follower.drawn == len(weights(version))
