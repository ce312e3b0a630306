"""Bugs of router replay: routes of the wrong token, layer, shard or sample, and routes that outlive their pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Body, Call, fault, kind
from verifier.faults.pack_faults import on_packs, on_rollouts, on_shards
from verifier.mesh import Mesh

if TYPE_CHECKING:
    from verifier.data.rollout import Rollout
    from verifier.train.pack import PackedBatch

REPLAY = "verifier.train.router_replay_megatron"
UPSTREAM = "megatron.core.transformer.moe.router_replay:RouterReplay"
UNCHOSEN = -1e4
"""Logit whose share in a softmax is nothing."""
ROW: dict[str, Any] = {"stage": Stage.REPLAY, "engine": NO_ENGINE, "mesh": Mesh(tp=2, cp=2, ep=2)}
BOTH: dict[str, Any] = {**ROW, "caught_by": ("RPL001", "RPL002")}


def _filled(routes: Any) -> Any:
    """Routes with experts 0 to K - 1 wherever one is missing, as trainers without a mark for it have them."""
    import torch

    missing = (routes < 0).any(-1, keepdim=True)
    return torch.where(missing, torch.arange(routes.shape[-1], dtype=routes.dtype), routes)


@kind(
    f"{REPLAY}:replay_routes(packed, tp, layers, moe_layers, num_experts, topk)",
    **{**BOTH, "model": "tiny:deepseek-v3", "mesh": Mesh(pp=2)},
)
def on_layers(columns_off: Callable[[Call], int], call: Call) -> Any:
    """Number the layers of routes wrongly: the function returns by how many columns they are off."""
    packed, columns = call.packed, columns_off(call)
    if not columns or packed.routes_TMK is None:
        return call.original()
    return call.faulty(packed=dataclasses.replace(packed, routes_TMK=packed.routes_TMK.roll(columns, dims=1)))


@kind(f"{UPSTREAM}.get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk)", **ROW)
def on_replay(choose: Body, call: Call) -> Any:
    """Choose wrongly in a router that replays a forward pass; the original has the right choice."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replays = call.self.router_replay_action is RouterReplayAction.REPLAY_FORWARD
    return choose(call) if replays else call.original()


def _own_choice(call: Call) -> Any:
    """Values and experts that the router chooses by itself."""
    return call.default_compute_topk(call.scores, call.topk, call.num_groups, call.group_topk)


@on_layers("verl-project/verl#5037")
def routes_count_dense_layers(call: Call) -> int:
    """Routes are numbered by layer and routers by router: each is off by one behind a dense layer."""
    return -int(call.moe_layers[0])


@on_layers("verl-project/verl#7106")
def routes_counted_from_the_stage(call: Call) -> int:
    """Layers are numbered within their pipeline stage, so the second stage gets the first one's routes."""
    return sum(layer < call.layers.start for layer in call.moe_layers)


@on_shards("THUDM/slime#2175", **BOTH)
def routes_not_cut_in_zigzag(whole: PackedBatch, shard: PackedBatch, cp_rank: int) -> PackedBatch | None:
    """Routes are cut into contiguous parts while context parallelism cuts tokens in zigzag chunks."""
    if whole.routes_TMK is None:
        return None
    rows = _filled(whole.routes_TMK).chunk(whole.alignment.cp)[cp_rank]
    return dataclasses.replace(shard, routes_TMK=rows)


@on_packs("verl-project/verl#7106", **BOTH)
def routes_without_inner_padding(packed: PackedBatch) -> PackedBatch | None:
    """Tokens are padded sample by sample and routes at the end of the pack, so later samples' routes are shifted."""
    if packed.routes_TMK is None:
        return None
    import torch

    real_T = packed.segments_T >= 0
    joined = torch.cat([packed.routes_TMK[real_T], packed.routes_TMK[~real_T]])
    return dataclasses.replace(packed, routes_TMK=_filled(joined))


@fault("verl-project/verl#7106", "verifier.train.router_replay:packed_rows_of(packed, tp)", **BOTH)
def routes_of_the_first_slice(call: Call) -> Any:
    """Under sequence parallelism every rank replays the first rank's slice of the routes."""
    return call.faulty(tp=0)


@on_rollouts("THUDM/slime#1052", **BOTH)
def routes_suffix_stale(rollouts: list[Rollout]) -> list[Rollout] | None:
    """The last tokens, whose routes the engine did not report, get those of the token before them."""
    if rollouts[0].routes is None:
        return None
    found = []
    for rollout in rollouts:
        assert rollout.routes is not None
        routes = rollout.routes.copy()
        routes[-3:] = routes[-4]
        found.append(dataclasses.replace(rollout, routes=routes))
    return found


@on_rollouts("NovaSky-AI/SkyRL#1908", **BOTH)
def routes_of_rejected_sample(rollouts: list[Rollout]) -> list[Rollout] | None:
    """A sample is replaced, and keeps the routes of the one that was rejected."""
    if rollouts[0].routes is None:
        return None
    import numpy as np
    import torch

    found = []
    for one, other in zip(rollouts, rollouts[1:] + rollouts[:1], strict=True):
        assert other.routes is not None
        routes = _filled(torch.from_numpy(other.routes)).numpy()
        found.append(dataclasses.replace(one, routes=routes[np.arange(len(one)) % len(other)]))
    return found


@fault("radixark/miles#2570", f"{REPLAY}:routers_of(chunk)", **BOTH)
def routers_bound_in_another_order(call: Call) -> Any:
    """Routes are handed to routers in the order of a list, which is not that of the layers."""
    found = call.faulty()
    return dict(zip(found, reversed(found.values()), strict=True))


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
