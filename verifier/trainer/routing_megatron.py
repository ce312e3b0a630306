"""Routes of a training run on one rank: those of rollouts are obeyed and recorded, chosen ones told to the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused
from verifier.core.record import Probe
from verifier.core.records_tokens import UsedRoutes
from verifier.data.rollout import Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.train.pack import PackedBatch
from verifier.train.router_replay_megatron import RouterPass, RouterWatch, Routing
from verifier.train.step_megatron import OnShards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    batch: str
    during: str
    choices: np.ndarray


class TrainingRoutes:
    """Routers of one rank and what they used. The constructor is a collective.

    Args:
        trainer: trainer; built for replay where the run replays.
        config: of the run. With `verify.steps`, what replaying routers used is kept until it is recorded.
    """

    def __init__(self, trainer: TrainerModel, config: TrainConfig) -> None:
        self._replays, self._keeps = config.grpo.replay_routes, config.verify.steps
        routed = bool(trainer.provider.num_moe_experts)
        self._tells = routed and not self._replays and config.verify.every != 0
        self._routing = Routing(trainer) if self._replays or self._tells else None
        self._used: list[_Used] = []

    @contextlib.contextmanager
    def during(
        self, rollouts: Sequence[Rollout], batch: str, name: str, on_shards: OnShards | None = None,
        oracle: Path | None = None,
    ) -> Iterator[OnShards | None]:  # fmt: skip
        """Within, a pass over these rollouts chooses the experts of their routes, in a run that replays.

        Args:
            rollouts: with routes, in a run that replays.
            batch: name of the mini-batch.
            name: of the pass.
            on_shards: another viewer of the pass's micro-batches.
            oracle: file for what routers chose by themselves, as `RouterWatch.choices`: the gradient of other experts
                tells nothing of the trainer's.

        Yields:
            What has to be called with its micro-batches.
        """
        told = oracle if self._tells else None
        if self._routing is None or not (self._replays or told):
            yield on_shards
            return
        with (RouterPass if self._replays else RouterWatch)(self._routing, rollouts) as watch:

            def both(shards: list[PackedBatch]) -> Callable[[], None] | None:
                watch.on_shards(shards)
                return on_shards(shards) if on_shards is not None else None

            yield both
        if told is not None:
            with full_disk_refused(told):
                told.parent.mkdir(exist_ok=True)
                np.save(told, watch.choices())
        elif self._keeps:
            self._used.append(
                _Used(batch=batch, during=name, choices=np.concatenate([watch.choices(), watch.recomputed()]))
            )

    def record(self, probe: Probe, version: int, batch: str) -> None:
        """Record what was used of the mini-batches of a step, named like one of them, and forget all."""
        step = batch.rpartition("-")[0]
        for item in self._used:
            if item.batch.rpartition("-")[0] == step:  # others are of steps without an update, which have no trace
                assert self._routing is not None
                record = UsedRoutes(
                    name=item.batch, version=version, coordinate=str(self._routing.at), during=item.during
                )
                probe.emit(record, item.choices)
        self._used = []
