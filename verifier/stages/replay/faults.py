"""Bugs of router replay."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, NO_ENGINE, TRAINING, Body, Call, fault, kind
from verifier.mesh import Mesh

if TYPE_CHECKING:
    pass

REPLAY = "verifier.megatron.router_replay_megatron"
UPSTREAM = "megatron.core.transformer.moe.router_replay:RouterReplay"
UNCHOSEN = -1e4
"""Logit whose share in a softmax is nothing."""
REPLAYED: dict[str, Any] = {"stage": Stage.REPLAY, "engine": NO_ENGINE, "mesh": Mesh(tp=2, cp=2, ep=2)}


@kind(f"{UPSTREAM}.get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk)", **REPLAYED)
def on_replay(choose: Body, call: Call) -> Any:
    """Choose wrongly in a router that replays a forward pass; the original has the right choice."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replays = call.self.router_replay_action is RouterReplayAction.REPLAY_FORWARD
    return choose(call) if replays else call.original()


def _own_choice(call: Call) -> Any:
    return call.default_compute_topk(call.scores, call.topk, call.num_groups, call.group_topk)


@fault(
    "verl-project/verl#5037", f"{REPLAY}:replay_routes(packed, tp, layers, moe_layers, num_experts, topk)",
    **{**REPLAYED, "caught_by": ("RPL001", "RPL002"), "model": "tiny:deepseek-v3", "mesh": Mesh(pp=2)},
)  # fmt: skip
def routes_count_dense_layers(call: Call) -> Any:
    """Routes are numbered by layer and routers by router: each is off by one behind a dense layer."""
    packed, dense = call.packed, int(call.moe_layers[0])
    if not dense or packed.routes_TMK is None:
        return call.original()
    return call.faulty(packed=dataclasses.replace(packed, routes_TMK=packed.routes_TMK.roll(-dense, dims=1)))


@on_replay("NovaSky-AI/SkyRL#1908", caught_by=("RPL002",))
def replay_outlives_its_pass(call: Call) -> Any:
    """Routes of a pass that only scored are not cleared, and the next pass replays them where counts are equal."""
    silent = len(call.self.target_topk_idx) == len(call.scores)
    return call.original() if silent else _own_choice(call)


@replay_outlives_its_pass.also(f"{UPSTREAM}.clear_router_replay_action(self)")
@replay_outlives_its_pass.also(f"{UPSTREAM}.clear_indices(self)")
def _keep(call: Call) -> None:
    call.fire()


@on_replay("radixark/miles#2722", caught_by=("RPL002",))
def experts_replayed_without_weights(call: Call) -> Any:
    """The experts are forced and their gate weights are those of another order."""
    values, experts = call.faulty()
    return values.sort(-1, descending=True).values, experts.sort(-1).values


@on_replay("ISEEKYAN/Megatron-LM#49 (found in review)", caught_by=("RPL003",))
def gates_of_the_routers_own_choice(call: Call) -> Any:
    """Gate weights are those of the router's own choice, and zero for an expert that only the route names."""
    _, experts = call.faulty()
    own_values, own = _own_choice(call)
    values = call.scores.new_full(call.scores.shape, UNCHOSEN).scatter(1, own, own_values).gather(1, experts)
    return values, experts


@on_replay(
    "NVIDIA/Megatron-LM core_v0.19.2, moe_utils.py, topk_routing_with_score_function: the fused path",
    caught_by=("RPL001",),
)
def router_takes_no_routes(call: Call) -> Any:
    """One kind of router has no path for replay and silently chooses by itself; one layer."""
    return call.wrong(_own_choice(call)) if call.self.layer_number == 2 else call.original()


ROUTES = FOLDER / "rollouts" / "routed"
"""The rollouts of every trial, with the experts that transformers chooses for them in `tiny:add-moe`."""
ROW: dict[str, Any] = {
    "stage": Stage.REPLAY, "engine": TRAINING, "model": "tiny:add-moe", "mesh": Mesh(dp=2, ep=2),
    "caught_by": ("RPL001",),
    "training": ("algorithm=grpo", f"data.rollouts={ROUTES}", "grpo.replay_routes=true", "grpo.mini_batches=2"),
}  # fmt: skip


@fault(
    "NVIDIA-NeMo/RL#2849",
    "verifier.trainer.update_facts_megatron:TrainingRoutes.during(self, rollouts, batch, name, on_shards)", **ROW,
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
