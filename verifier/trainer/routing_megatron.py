"""Router replay of a training run on one rank: each pass obeys the rollouts' routes, and what it used is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verifier.core.record import Probe
from verifier.core.records_tokens import UsedRoutes
from verifier.data.rollout import Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.train.pack import PackedBatch
from verifier.train.router_replay_megatron import RouterPass, Routing
from verifier.train.step_megatron import OnShards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    batch: str
    during: str
    choices: np.ndarray


class TrainingReplay:
    """Routers of one rank and what they used. The constructor is a collective.

    Args:
        trainer: trainer built for replay.
        keep: what the routers used is kept until it is recorded.
    """

    def __init__(self, trainer: TrainerModel, *, keep: bool) -> None:
        self._routing, self._keep = Routing(trainer), keep
        self._used: list[_Used] = []

    @contextlib.contextmanager
    def obeyed(
        self, rollouts: Sequence[Rollout], batch: str, during: str, on_shards: OnShards | None = None
    ) -> Iterator[OnShards]:
        """Within, the pass over these rollouts chooses the experts of their routes.

        Args:
            rollouts: with routes.
            batch: name of the mini-batch.
            during: name of the pass.
            on_shards: another viewer of the pass's micro-batches.

        Yields:
            What has to be called with its micro-batches.
        """
        with RouterPass(self._routing, rollouts) as watch:

            def both(shards: list[PackedBatch]) -> Callable[[], None] | None:
                watch.on_shards(shards)
                return on_shards(shards) if on_shards is not None else None

            yield both
        if self._keep:
            self._used.append(_Used(batch=batch, during=during, choices=watch.choices()))

    def record(self, probe: Probe, version: int, batch: str) -> None:
        """Record what was used of the mini-batches of a step, named like one of them, and forget all."""
        step = batch.rpartition("-")[0]
        for item in self._used:
            if item.batch.rpartition("-")[0] == step:  # others are of steps without an update, which have no trace
                record = UsedRoutes(
                    name=item.batch, version=version, coordinate=str(self._routing.at), during=item.during
                )
                probe.emit(record, item.choices)
        self._used = []


@contextlib.contextmanager
def obeying(
    replay: TrainingReplay | None, rollouts: Sequence[Rollout], batch: str, during: str,
    on_shards: OnShards | None = None,
) -> Iterator[OnShards | None]:  # fmt: skip
    """`TrainingReplay.obeyed` of a run that replays; of another one its routers choose by themselves."""
    if replay is None:
        yield on_shards
        return
    with replay.obeyed(rollouts, batch, during, on_shards) as both:
        yield both
