"""Several engines that are asked as one: each holds all weights, and answers its part of a batch. Torch-free."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from verifier.engine.api import Sample, Sampling
from verifier.engine.client import EngineClient
from verifier.errors import ContractError
from verifier.launch.watchdog import Vigil
from verifier.transport.wire import Address

_LOOK_S = 0.5
"""Seconds between two looks at other processes."""


class EngineReplicas(EngineClient):
    """A connection to each of several engines of equal configuration.

    A request goes to all of them. Lists of answers, one for each engine rank, are joined in the order of the engines.
    Prompt p of a batch is answered by engine p modulo their number, with the seed of its place in the whole batch.
    The death of one ends the wait for all.
    """

    def __init__(self, sockets: Sequence[Path | str], deadline_s: float = 300, vigil: Vigil | None = None) -> None:
        self._deadline_s, self._vigil = deadline_s, vigil or Vigil()
        with contextlib.ExitStack() as undo:
            self._clients: list[EngineClient] = []
            for number, path in enumerate(sockets):
                self._clients.append(EngineClient(path, deadline_s, f"engine {number}", vigil))
                undo.callback(self._clients[-1].close)
            undo.pop_all()

    def start(
        self, request: str, kind: Any = None, *, deadline_s: float | None = None, **arguments: Any
    ) -> Callable[[], Any]:
        """See `EngineClient.start`; the answer is joined."""
        answers = {
            number: client.start(request, kind, deadline_s=deadline_s, **arguments)
            for number, client in enumerate(self._clients)
        }
        return self._joined(answers, deadline_s)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`."""
        parts = deal(prompts, sampling, len(self._clients))
        answers = {
            number: self._clients[number].start("generate", list[list[Sample]], prompts=dealt, sampling=asdict(own))
            for number, (dealt, own) in enumerate(parts)
            if dealt
        }
        return in_turn(self._joined(answers)() if answers else [], len(prompts), len(self._clients))

    def begin_batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling, steps: int) -> None:
        """See `Engine.begin_batch`."""
        parts = deal(prompts, sampling, len(self._clients))
        answers = {
            number: self._clients[number].start("begin_batch", prompts=dealt, sampling=asdict(own), steps=steps)
            for number, (dealt, own) in enumerate(parts)
        }
        self._joined(answers)()

    def finish_batch(self) -> list[list[Sample]]:
        """See `Engine.finish_batch`."""
        found = self.ask("finish_batch", list[list[Sample]])
        return in_turn(found, len(found), len(self._clients))

    def connect(self, address: Address) -> Callable[[], None]:
        """See `Engine.connect`; the ranks of an engine follow those of the engine before it."""
        ranks = (address.world_size - 1) // len(self._clients)
        return self._joined(
            {
                number: client.connect(replace(address, first=number * ranks))
                for number, client in enumerate(self._clients)
            }
        )

    def speaks(self, within_s: float) -> bool:
        """See `EngineClient.speaks`; of any engine."""
        return bool(self._ready(self._clients, within_s))

    def close(self) -> None:
        """Close the connections; the engines stay."""
        for client in self._clients:
            client.close()

    def _joined(self, answers: Mapping[int, Callable[[], Any]], deadline_s: float | None = None) -> Callable[[], Any]:
        """Wait for the answers of engines, by their number, whoever is first, and join them."""

        def take() -> Any:
            found: dict[int, Any] = {}
            refused: ContractError | None = None
            until = time.monotonic() + (deadline_s or self._deadline_s)
            left = list(answers)
            while left:
                ready = self._ready([self._clients[number] for number in left], _LOOK_S)
                if not ready and time.monotonic() < until:
                    self._vigil.look()
                    continue
                number = left.pop(ready[0] if ready else 0)
                try:
                    found[number] = answers[number]()
                except ContractError as problem:  # the others' answers must not be taken for those of a later request
                    refused = refused or problem
            if refused is not None:
                raise refused
            return _joined([found[number] for number in answers])

        return take

    @staticmethod
    def _ready(clients: Sequence[EngineClient], within_s: float) -> list[int]:
        """Places of clients that can be read."""
        if closed := [place for place, client in enumerate(clients) if client.descriptor is None]:
            return closed
        places = {client.descriptor: place for place, client in enumerate(clients)}
        found = connection.wait([item for item in places if item is not None], within_s)
        return [place for descriptor, place in places.items() if descriptor in found]


def clients_of(sockets: Sequence[Path | str], deadline_s: float, vigil: Vigil | None = None) -> EngineClient:
    """Connect to an engine, or to several as one."""
    if len(sockets) == 1:
        return EngineClient(sockets[0], deadline_s, vigil=vigil)
    return EngineReplicas(sockets, deadline_s, vigil)


def node_of(replica: int, nodes: int) -> int:
    """Number of the node that an engine is on; rank 0 is on node 0."""
    return replica % nodes


def deal(prompts: Sequence[Sequence[int]], sampling: Sampling, count: int) -> list[tuple[list[list[int]], Sampling]]:
    """Prompts of each of so many engines, by their place, and how each is sampled: as in the whole batch.

    The generators that serve requests without a seed have seeds of their own.
    """
    found = []
    for number in range(count):
        places = range(number, len(prompts), count)
        own = replace(sampling, seed=sampling.seed + number, each=tuple(sampling.of(place) for place in places))
        found.append(([list(prompts[place]) for place in places], own))
    return found


def in_turn(found: list[list[Sample]], total: int, count: int) -> list[list[Sample]]:
    """Undo `deal`: answers, engine after engine, in the order of the whole batch."""
    order = [place for number in range(count) for place in range(number, total, count)]
    return [answers for _, answers in sorted(zip(order, found, strict=True), key=lambda item: item[0])]


def _joined(answers: Sequence[Any]) -> Any:
    """Lists one after the other, truths all at once; None for None."""
    if isinstance(answers[0], list):
        return [item for answer in answers for item in answer]
    if isinstance(answers[0], bool):
        return all(answers)
    return answers[0]
