"""Router replay in a run: routes that no router would choose must be obeyed, its own must change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from verifier.core.evidence import Evidence, Probe
from verifier.core.stage import Stage
from verifier.data.rollout import MISSING_ROUTE, Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.train.replay import sentinel_routes
from verifier.train.replay_megatron import Routing
from verifier.train.step_megatron import score


def record_replay(probe: Probe, trainer: TrainerModel, rollouts: Sequence[Rollout]) -> None:
    """Score the same tokens by natural, by replayed natural and by made-up routes, then without any. A collective.

    Recorded are the experts that every rank's routers used under made-up routes, and the log-probabilities of the
    passes that must agree.

    Args:
        probe: this rank's recorder.
        trainer: built with `replay_megatron.PROVIDER_FIELDS`, and with experts.
        rollouts: the same on every rank; routes that they carry are left out.
    """
    routing = Routing(trainer)
    natural, routed, every_row = routing.score_naturally(rollouts)
    made_up = [
        replace(
            rollout,
            routes=sentinel_routes(
                key, len(rollout), num_moe_layers=len(routing.moe_layers), num_experts=routing.num_experts,
                topk=routing.topk,
            ),
        )
        for key, rollout in enumerate(rollouts)
    ]  # fmt: skip
    replayed, _ = routing.score_replaying(routed, every_row)
    _, choices = routing.score_replaying(made_up)
    released = score(trainer, rollouts)
    at = str(trainer.mesh.coordinate(dist.get_rank()))
    _emit(probe, "choice", "sentinel routes", {"at": at}, torch.from_numpy(choices))
    if dist.get_rank() != 0:
        return
    ids = [rollout.id for rollout in rollouts]
    _emit(probe, "routes", "sentinel routes", {"rollouts": ids}, _listed(made_up, routing.moe_layers))
    for kind, name, rows in (
        ("natural", "natural routes", natural),
        ("scored", "natural routes replayed", replayed),
        ("scored", "no routes after replay", released),
    ):
        _emit(probe, kind, name, {"rollouts": ids, "lengths": [row.numel() for row in rows]}, torch.cat(rows))


def _listed(rollouts: Sequence[Rollout], moe_layers: Sequence[int]) -> torch.Tensor:
    """[N, 3 + K] int32, one row per token and layer that has a route: rollout, position, global layer, experts."""
    parts = []
    for index, rollout in enumerate(rollouts):
        assert rollout.routes is not None
        position, column = np.nonzero((rollout.routes != MISSING_ROUTE).all(-1))
        layer = np.asarray(moe_layers)[column]
        where = np.stack([np.full_like(position, index), position, layer], axis=-1)
        parts.append(np.concatenate([where, rollout.routes[position, column]], axis=-1))
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def _emit(probe: Probe, kind: str, name: str, facts: dict[str, object], array: torch.Tensor) -> None:
    probe.emit(Evidence(stage=Stage.REPLAY, kind=kind, name=name, facts=facts), array)
