"""Routes of a training run on one rank: those of rollouts are obeyed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from verifier.data.rollout import Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.train.pack import PackedBatch
from verifier.train.router_replay_megatron import RouterPass, Routing
from verifier.train.step_megatron import OnShards
from verifier.trainer.observer import RankObserver


class TrainingRoutes:
    """Routers of one rank. The constructor is a collective.

    Args:
        trainer: built for replay where the run replays.
        replays: passes choose the experts of the rollouts' routes.
        observer: told of what they used.
    """

    def __init__(self, trainer: TrainerModel, observer: RankObserver, *, replays: bool) -> None:
        self._routing, self._observer = Routing(trainer) if replays else None, observer

    @contextlib.contextmanager
    def during(
        self, rollouts: Sequence[Rollout], batch: str | None, name: str, on_shards: OnShards | None = None
    ) -> Iterator[OnShards | None]:
        """Within, a pass over these rollouts chooses the experts of their routes, in a run that replays.

        Args:
            rollouts: with routes, in a run that replays.
            batch: name of the mini-batch; None for some of it, of which nobody is told.
            name: of the pass.
            on_shards: another viewer of the pass's micro-batches.

        Yields:
            What has to be called with its micro-batches.
        """
        if self._routing is None:
            yield on_shards
            return
        with RouterPass(self._routing, rollouts) as watch:

            def both(shards: list[PackedBatch]) -> Callable[[], None] | None:
                watch.on_shards(shards)
                return on_shards(shards) if on_shards is not None else None

            yield both
        if batch is not None:
            self._observer.on_routes(batch, name, watch)
