"""Router replay in a run: routes that no router would choose must be obeyed, its own must change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from verifier.core.record import Probe
from verifier.core.records_tokens import (
    ForcedRouteLogprobs,
    GivenRoutes,
    NaturalRouteLogprobs,
    ReplayedRouteLogprobs,
    UsedRoutes,
)
from verifier.data.rollout import MISSING_ROUTE, Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.train.pack import PackedBatch
from verifier.train.router_replay_megatron import RouterPass, Routing
from verifier.train.step_megatron import OnShards, score


def record_replay(probe: Probe, trainer: TrainerModel, rollouts: Sequence[Rollout]) -> None:
    """Score the same tokens by natural, by replayed natural and by made-up routes, then without any. A collective.

    Recorded are the experts that every rank's routers used under made-up routes, what came of them, and the
    log-probabilities of the passes that must agree.

    Args:
        probe: this rank's recorder.
        trainer: built with `replay_megatron.PROVIDER_FIELDS`, and with experts.
        rollouts: the same on every rank; routes that they carry are left out.
    """
    routing = Routing(trainer)
    natural, routed, every_row = routing.score_naturally(rollouts)
    made_up = _made_up(routing, rollouts)
    replayed, _ = routing.score_replaying(routed, every_row)
    forced, choices = routing.score_replaying(made_up)
    released = score(trainer, rollouts)
    _record_choices(probe, routing, made_up, choices, 0)
    if dist.get_rank() != 0:
        return
    ids = tuple(rollout.id for rollout in rollouts)
    for kind, name, rows in (
        (ForcedRouteLogprobs, "sentinel routes", forced),
        (NaturalRouteLogprobs, "natural routes", natural),
        (ReplayedRouteLogprobs, "natural routes replayed", replayed),
        (ReplayedRouteLogprobs, "no routes after replay", released),
    ):
        probe.emit(kind(name=name, rollouts=ids, lengths=tuple(row.numel() for row in rows)), torch.cat(rows))


@contextlib.contextmanager
def replaying_every_second(
    probe: Probe, trainer: TrainerModel, rollouts: Sequence[Rollout], version: int, on_shards: OnShards
) -> Iterator[tuple[Sequence[Rollout], OnShards]]:
    """The rollouts of a training step; of a mixture of experts those of every second step have routes to be obeyed.

    Routes that no router would choose: then no rounding flips one, and gradients in bf16 are as near to transformers'
    as a dense model's. Steps between go by the routers' own choice.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        rollouts: without routes.
        version: that the step makes.
        on_shards: called with the step's micro-batches.

    Yields:
        What to train on, and what has to be called with its micro-batches.
    """
    if version % 2 == 0 or not trainer.provider.num_moe_experts or not trainer.provider.moe_enable_routing_replay:
        yield rollouts, on_shards
        return
    routing = Routing(trainer)
    made_up = _made_up(routing, rollouts)
    with RouterPass(routing, made_up) as watch:

        def both(shards: list[PackedBatch]) -> Callable[[], None] | None:
            watch.on_shards(shards)
            return on_shards(shards)

        yield made_up, both
    _record_choices(probe, routing, made_up, watch.choices(), version)


def _made_up(routing: Routing, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with random routes that no router would choose by itself; the last token has none, as an engine's.

    They are different for every rollout, token and layer, and distinct within each token's layer.
    """
    found = []
    for key, rollout in enumerate(rollouts):
        draw = np.random.default_rng([key, len(rollout)])
        order = draw.random((len(rollout), len(routing.moe_layers), routing.num_experts)).argsort(-1)
        routes = order[..., : routing.topk].astype(np.int32)
        routes[-1] = MISSING_ROUTE
        found.append(replace(rollout, routes=routes))
    return found


def _record_choices(
    probe: Probe, routing: Routing, made_up: Sequence[Rollout], choices: np.ndarray, version: int
) -> None:
    at = str(routing.trainer.mesh.coordinate(dist.get_rank()))
    probe.emit(UsedRoutes(name="sentinel routes", version=version, coordinate=at), choices)
    if dist.get_rank() == 0:
        ids = tuple(rollout.id for rollout in made_up)
        listed = _listed(made_up, routing.moe_layers)
        probe.emit(GivenRoutes(name="sentinel routes", version=version, rollouts=ids), listed)


def _listed(rollouts: Sequence[Rollout], moe_layers: Sequence[int]) -> np.ndarray:
    """[N, 3 + K] int32, one row per token and layer that has a route: rollout, position, global layer, experts."""
    parts = []
    for index, rollout in enumerate(rollouts):
        assert rollout.routes is not None
        position, column = np.nonzero((rollout.routes != MISSING_ROUTE).all(-1))
        layer = np.asarray(moe_layers)[column]
        where = np.stack([np.full_like(position, index), position, layer], axis=-1)
        parts.append(np.concatenate([where, rollout.routes[position, column]], axis=-1))
    return np.concatenate(parts).astype(np.int32)
