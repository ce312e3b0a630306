"""Bugs of router replay: routes of the wrong token, layer, shard or sample, and routes that outlive their pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Body, Fault, FireCounter, fault
from verifier.faults.pack_faults import on_packs, on_rollouts, on_shards
from verifier.mesh import Mesh

if TYPE_CHECKING:
    from verifier.data.rollout import Rollout
    from verifier.train.pack import PackedBatch

REPLAY = "verifier.train.router_replay_megatron"
UPSTREAM = "megatron.core.transformer.moe.router_replay:RouterReplay"
CHOOSE = f"{UPSTREAM}.get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk)"
UNCHOSEN = -1e4
"""Logit whose share in a softmax is nothing."""
ROW: dict[str, Any] = {"stage": Stage.REPLAY, "engine": NO_ENGINE, "mesh": Mesh(tp=2, cp=2, ep=2)}
BOTH: dict[str, Any] = {**ROW, "caught_by": ("RPL001", "RPL002")}


def _filled(routes: Any) -> Any:
    """Routes with experts 0 to K - 1 wherever one is missing, as trainers without a mark for it have them."""
    import torch

    missing = (routes < 0).any(-1, keepdim=True)
    return torch.where(missing, torch.arange(routes.shape[-1], dtype=routes.dtype), routes)


def on_layers(**row: Any) -> Callable[[Callable[..., int]], Fault]:
    """Register a fault in the layer numbers of routes: the function returns by how many columns they are off."""

    def register(columns_off: Callable[..., int]) -> Fault:
        @functools.wraps(columns_off)
        def replay_routes(original: Any, fire: FireCounter, packed: Any, **where: Any) -> Any:
            columns = columns_off(**where)
            if columns and packed.routes_TMK is not None:
                fire()
                packed = dataclasses.replace(packed, routes_TMK=packed.routes_TMK.roll(columns, dims=1))
            return original(packed, **where)

        target = f"{REPLAY}:replay_routes(packed, tp, layers, moe_layers, num_experts, topk)"
        on_stages = {**BOTH, "model": "tiny:deepseek-v3", "mesh": Mesh(pp=2)}
        return fault(target, **on_stages, **row)(replay_routes)

    return register


def on_replay(**row: Any) -> Callable[[Body], Fault]:
    """Register a fault in a router's choice while it replays a forward pass; `chosen` has its right choice."""

    def register(choose: Body) -> Fault:
        @functools.wraps(choose)
        def get_replay_topk(original: Any, fire: FireCounter, self: Any, *args: Any) -> Any:
            from megatron.core.transformer.moe.router_replay import RouterReplayAction

            if self.router_replay_action is not RouterReplayAction.REPLAY_FORWARD:
                return original(self, *args)
            return choose(original, fire, self, *args)

        return fault(CHOOSE, **ROW, **row)(get_replay_topk)

    return register


@on_layers(id="routes-count-dense-layers", reproduces="verl-project/verl#5037")
def routes_count_dense_layers(*, moe_layers: Any, **where: Any) -> int:
    """Routes are numbered by layer and routers by router: each is off by one behind a dense layer."""
    return -int(moe_layers[0])


@on_layers(id="routes-counted-from-the-stage", reproduces="verl-project/verl#7106")
def routes_counted_from_the_stage(*, layers: range, moe_layers: Any, **where: Any) -> int:
    """Layers are numbered within their pipeline stage, so the second stage gets the first one's routes."""
    return sum(layer < layers.start for layer in moe_layers)


@on_shards(id="routes-not-cut-in-zigzag", reproduces="THUDM/slime#2175", **BOTH)
def routes_not_cut_in_zigzag(whole: PackedBatch, shard: PackedBatch, cp_rank: int) -> PackedBatch | None:
    """Routes are cut into contiguous parts while context parallelism cuts tokens in zigzag chunks."""
    if whole.routes_TMK is None:
        return None
    rows = _filled(whole.routes_TMK).chunk(whole.alignment.cp)[cp_rank]
    return dataclasses.replace(shard, routes_TMK=rows)


@on_packs(id="routes-without-inner-padding", reproduces="verl-project/verl#7106", **BOTH)
def routes_without_inner_padding(packed: PackedBatch) -> PackedBatch | None:
    """Tokens are padded sample by sample and routes at the end of the pack, so later samples' routes are shifted."""
    if packed.routes_TMK is None:
        return None
    import torch

    real_T = packed.segments_T >= 0
    joined = torch.cat([packed.routes_TMK[real_T], packed.routes_TMK[~real_T]])
    return dataclasses.replace(packed, routes_TMK=_filled(joined))


@fault(
    "verifier.train.router_replay:packed_rows_of(packed, tp)",
    id="routes-of-the-first-slice", reproduces="verl-project/verl#7106", **BOTH,
)  # fmt: skip
def routes_of_the_first_slice(original: Any, fire: FireCounter, packed: Any, tp: int) -> Any:
    """Under sequence parallelism every rank replays the first rank's slice of the routes."""
    fire()
    return original(packed, 0)


@on_rollouts(id="routes-suffix-stale", reproduces="THUDM/slime#1052", **BOTH)
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


@on_rollouts(id="routes-of-rejected-sample", reproduces="NovaSky-AI/SkyRL#1908", **BOTH)
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


@fault(f"{REPLAY}:routers_of(chunk)", id="routers-bound-in-another-order", reproduces="radixark/miles#2570", **BOTH)
def routers_bound_in_another_order(original: Any, fire: FireCounter, chunk: Any) -> Any:
    """Routes are handed to routers in the order of a list, which is not that of the layers."""
    fire()
    found = original(chunk)
    return dict(zip(found, reversed(found.values()), strict=True))


@on_replay(id="replay-outlives-its-pass", reproduces="NovaSky-AI/SkyRL#1908", caught_by=("RPL002",))
def replay_outlives_its_pass(original: Any, fire: FireCounter, self: Any, scores: Any, topk: int, *rest: Any) -> Any:
    """Routes of a pass that only scored are not cleared, and the next pass replays them where counts are equal."""
    if len(self.target_topk_idx) != len(scores):  # with another number of rows it would not be silent
        *groups, default = rest
        return default(scores, topk, *groups)
    return original(self, scores, topk, *rest)


@replay_outlives_its_pass.also(f"{UPSTREAM}.clear_indices(self)", f"{UPSTREAM}.clear_router_replay_action(self)")
def _keep(original: Any, fire: FireCounter, self: Any) -> None:
    fire()


@on_replay(id="experts-replayed-without-weights", reproduces="radixark/miles#2722", caught_by=("RPL002",))
def experts_replayed_without_weights(original: Any, fire: FireCounter, *args: Any) -> Any:
    """The experts are forced and their gate weights are those of another order."""
    values, experts = original(*args)
    fire()
    return values.sort(-1, descending=True).values, experts.sort(-1).values


@on_replay(
    id="gates-of-the-routers-own-choice", reproduces="ISEEKYAN/Megatron-LM#49 (found in review)",
    caught_by=("RPL003",),
)  # fmt: skip
def gates_of_the_routers_own_choice(
    original: Any, fire: FireCounter, self: Any, scores: Any, topk: int, *rest: Any
) -> Any:
    """Gate weights are those of the router's own choice, and zero for an expert that only the route names."""
    _, experts = original(self, scores, topk, *rest)
    fire()
    *groups, default = rest
    own_values, own = default(scores, topk, *groups)
    values = scores.new_full(scores.shape, UNCHOSEN).scatter(1, own, own_values).gather(1, experts)
    return values, experts


@on_replay(
    id="router-takes-no-routes", caught_by=("RPL001",),
    reproduces="NVIDIA/Megatron-LM core_v0.19.2, moe_utils.py, topk_routing_with_score_function: the fused path",
)  # fmt: skip
def router_takes_no_routes(original: Any, fire: FireCounter, self: Any, scores: Any, topk: int, *rest: Any) -> Any:
    """One kind of router has no path for replay and silently chooses by itself; one layer."""
    if self.layer_number != 2:
        return original(self, scores, topk, *rest)
    fire()
    *groups, default = rest
    return default(scores, topk, *groups)
