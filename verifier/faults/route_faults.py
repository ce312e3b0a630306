"""Bugs of router replay in a training run: routes of another token, layer or rollout, and a pass without any."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
from verifier.faults.pack_faults import on_rollouts
from verifier.mesh import Mesh

if TYPE_CHECKING:
    import numpy as np

    from verifier.data.rollout import Rollout

ROUTES = Path(__file__).parent / "rollouts" / "routed"
"""The rollouts of every trial, with the experts that transformers chooses for them in `tiny:add-moe`."""
ROW: dict[str, Any] = {
    "stage": Stage.REPLAY, "engine": TRAINING, "model": "tiny:add-moe", "mesh": Mesh(dp=2, ep=2),
    "caught_by": ("RPL001",),
    "training": ("algorithm=grpo", f"data.rollouts={ROUTES}", "grpo.replay_routes=true", "grpo.mini_batches=2"),
}  # fmt: skip


def _with_routes(rollouts: list[Rollout], routes: list[np.ndarray]) -> list[Rollout]:
    """The rollouts with other routes for all tokens but the last, which has none."""
    found = []
    for rollout, other in zip(rollouts, routes, strict=True):
        assert rollout.routes is not None
        whole = rollout.routes.copy()
        whole[:-1] = other
        found.append(dataclasses.replace(rollout, routes=whole))
    return found


def _routes(rollouts: list[Rollout]) -> list[np.ndarray]:
    return [item.routes[:-1] for item in rollouts if item.routes is not None]


@on_rollouts("inclusionAI/AReno#524", **ROW)
def routes_of_the_next_token(rollouts: list[Rollout]) -> list[Rollout]:
    """Routes begin a token late, so each token is replayed with those of its successor."""
    import numpy as np

    return _with_routes(rollouts, [np.roll(each, -1, axis=0) for each in _routes(rollouts)])


@fault(
    "NVIDIA-NeMo/RL#2849",
    "verifier.trainer.routing_megatron:TrainingRoutes.during(self, rollouts, batch, name, on_shards)", **ROW,
)  # fmt: skip
def routes_not_trained_on(call: Call) -> Any:
    """Log-probabilities are scored by the routes, and the batch to train on is built without them."""
    if not call.name.startswith("update"):
        return call.original()
    call.fire()
    return contextlib.nullcontext(call.on_shards)


@fault(
    "areal-project/AReaL#1166 (found in review)",
    "megatron.core.transformer.moe.router_replay:RouterReplay.get_replay_topk(self, scores, topk, num_groups, "
    "group_topk, default_compute_topk)",
    **{**ROW, "training": (*ROW["training"], "megatron.recompute=full", "optimizer.learning_rate=3e-3")},
)  # fmt: skip
def recomputed_routers_choose_by_themselves(call: Call) -> Any:
    """Recomputation finds no routes and falls back to the router's own choice, which has moved with the weights."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay = call.self
    if replay.router_replay_action is not RouterReplayAction.REPLAY_BACKWARD:
        return call.original()
    own = call.default_compute_topk(call.scores, call.topk, num_groups=call.num_groups, group_topk=call.group_topk)
    if own[1].sort(-1).values.equal(replay.replay_backward_list.pop(0).sort(-1).values):
        return own
    return call.wrong(own)
