"""Router replay in a run: routes that no router would choose must be obeyed, its own must change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from verifier.core.record import Probe
from verifier.data.rollout import MISSING_ROUTE, Rollout, route_rows
from verifier.megatron.pack import PackedBatch
from verifier.megatron.router_replay_megatron import RouterPass, RouterWatch, Routing
from verifier.megatron.step_megatron import OnShards, score
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.replay.records import (
    OWN_ROUTES,
    ForcedRouteLogprobs,
    GivenRoutes,
    NaturalRouteLogprobs,
    ReplayedRouteLogprobs,
    UsedRoutes,
)


def record_replay(probe: Probe, trainer: TrainerModel, rollouts: Sequence[Rollout]) -> None:
    """Score the same tokens by natural, by replayed natural and by made-up routes, then without any. A collective.

    Recorded are the experts that every rank's routers used under made-up routes, what came of them, and the
    log-probabilities of the passes that must agree. The rollouts are the same on every rank; their routes are left out.
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
def replaying(
    probe: Probe, trainer: TrainerModel, rollouts: Sequence[Rollout], version: int, on_shards: OnShards, *, on: bool
) -> Iterator[tuple[Sequence[Rollout], OnShards]]:
    """The rollouts of a training step; of a mixture of experts they have routes to be obeyed if it is `on`.

    Routes that no router would choose: then no rounding flips one, and gradients in bf16 are as near to transformers'
    as a dense model's. Other steps go by the routers' own choice, which is recorded in less than float32: there the
    gradient of other experts tells nothing of the trainer's.

    Yields:
        What to train on, and what has to be called with its micro-batches; it calls `on_shards` with them.
    """
    provider = trainer.provider
    told = on or provider.params_dtype != torch.float32
    if not told or not provider.num_moe_experts or not provider.moe_enable_routing_replay:
        yield rollouts, on_shards
        return
    routing = Routing(trainer)
    trained = _made_up(routing, rollouts) if on else rollouts
    with (RouterPass if on else RouterWatch)(routing, trained) as watch:

        def both(shards: list[PackedBatch]) -> Callable[[], None] | None:
            watch.on_shards(shards)
            return on_shards(shards)

        yield trained, both
    if on:
        _record_choices(probe, routing, trained, np.concatenate([watch.choices(), watch.recomputed()]), version)
    else:
        probe.emit(UsedRoutes(name=OWN_ROUTES, version=version, coordinate=str(routing.at)), watch.choices())


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
    """Both as [N, 3 + K] int32: rollout, position, global layer and experts of each token and layer with a route."""
    probe.emit(UsedRoutes(name="sentinel routes", version=version, coordinate=str(routing.at)), choices)
    if dist.get_rank() != 0:
        return
    ids = tuple(rollout.id for rollout in made_up)
    given = GivenRoutes(name="sentinel routes", version=version, rollouts=ids)
    probe.emit(given, route_rows(made_up, routing.moe_layers))
