"""Bugs of router replay: routes of the wrong token, layer, shard or sample, and routes that outlive their pass."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verifier.core.stage import Stage
from verifier.faults.bugs_pack import on_packs, on_rollouts, on_shards
from verifier.faults.fault import NO_ENGINE, Fault, Fired, Inject
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

if TYPE_CHECKING:
    from verifier.data.rollout import Rollout
    from verifier.train.pack import PackedBatch

REPLAY = "verifier.train.router_replay_megatron"
UPSTREAM = "megatron.core.transformer.moe.router_replay:RouterReplay"
TOPK_PARAMETERS = "self, scores, topk, num_groups, group_topk, default_compute_topk"
UNCHOSEN = -1e4
"""Of a logit: no share in a softmax."""
STAGES = Mesh(pp=2)
SHARDS = Mesh(tp=2, cp=2, ep=2)


def _filled(routes: Any) -> Any:
    """Routes with experts 0 to K - 1 wherever one is missing, as trainers without a mark for it have them."""
    import torch

    missing = (routes < 0).any(-1, keepdim=True)
    return torch.where(missing, torch.arange(routes.shape[-1], dtype=routes.dtype), routes)


def _columns_moved(by: Callable[[Any, int, int, Any, int], int]) -> Inject:
    """A fault in the layer numbers of routes: `by` gives how many columns they are off."""

    @contextlib.contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        def make(original: Any) -> Any:
            def replay_routes(packed: Any, **where: Any) -> Any:
                columns = by(where["mesh"], where["pp"], where["chunk"], where["moe_layers"], where["num_layers"])
                if columns and packed.routes_TMK is not None:
                    fired()
                    packed = dataclasses.replace(packed, routes_TMK=packed.routes_TMK.roll(columns, dims=1))
                return original(packed, **where)

            return replay_routes

        with replaced(
            f"{REPLAY}:replay_routes",
            "packed, mesh, pp, chunk, tp, num_layers, moe_layers, num_experts, topk",
            make,
        ):
            yield

    return inject


def _dense_layers_counted(mesh: Mesh, pp: int, chunk: int, moe_layers: Any, num_layers: int) -> int:
    return -int(moe_layers[0])


def _counted_from_stage(mesh: Mesh, pp: int, chunk: int, moe_layers: Any, num_layers: int) -> int:
    begin = mesh.layers_of(pp, chunk, num_layers).start
    return sum(layer < begin for layer in moe_layers)


def _contiguous_rows(whole: PackedBatch, shard: PackedBatch, cp_rank: int) -> PackedBatch | None:
    if whole.routes_TMK is None:
        return None
    rows = _filled(whole.routes_TMK).chunk(whole.alignment.cp)[cp_rank]
    return dataclasses.replace(shard, routes_TMK=rows)


def _padding_at_the_end(packed: PackedBatch) -> PackedBatch | None:
    if packed.routes_TMK is None:
        return None
    import torch

    real_T = packed.segments_T >= 0
    joined = torch.cat([packed.routes_TMK[real_T], packed.routes_TMK[~real_T]])
    return dataclasses.replace(packed, routes_TMK=_filled(joined))


def _stale_suffix(rollouts: list[Rollout]) -> list[Rollout] | None:
    if rollouts[0].routes is None:
        return None
    found = []
    for rollout in rollouts:
        assert rollout.routes is not None
        routes = rollout.routes.copy()
        routes[-3:] = routes[-4]
        found.append(dataclasses.replace(rollout, routes=routes))
    return found


def _routes_of_the_rejected(rollouts: list[Rollout]) -> list[Rollout] | None:
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


@contextlib.contextmanager
def _first_slice_on_all(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def rows(packed: Any, mesh: Any, tp: int) -> slice:
            fired()
            held: slice = original(packed, mesh, 0)
            return held

        return rows

    with replaced("verifier.train.router_replay:packed_rows_of", "packed, mesh, tp", make):
        yield


@contextlib.contextmanager
def _bound_in_another_order(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def routers_of(chunk: Any) -> Any:
            fired()
            found = original(chunk)
            return dict(zip(found, reversed(found.values()), strict=True))

        return routers_of

    with replaced(f"{REPLAY}:routers_of", "chunk", make):
        yield


@contextlib.contextmanager
def _kept_after_the_pass(fired: Fired) -> Iterator[None]:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def keep(original: Any) -> Any:
        def clear(self: Any) -> None:
            fired()

        return clear

    def make(original: Any) -> Any:
        def choose(self: Any, scores: Any, topk: int, *rest: Any) -> Any:
            replaying = self.router_replay_action is RouterReplayAction.REPLAY_FORWARD
            # With another number of rows it would not be silent.
            if replaying and len(self.target_topk_idx) != len(scores):
                *groups, default = rest
                return default(scores, topk, *groups)
            return original(self, scores, topk, *rest)

        return choose

    with (
        replaced(f"{UPSTREAM}.clear_indices", "self", keep),
        replaced(f"{UPSTREAM}.clear_router_replay_action", "self", keep),
        replaced(f"{UPSTREAM}.get_replay_topk", TOPK_PARAMETERS, make),
    ):
        yield


@contextlib.contextmanager
def _weights_in_another_order(fired: Fired) -> Iterator[None]:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def make(original: Any) -> Any:
        def choose(self: Any, scores: Any, *rest: Any) -> Any:
            values, experts = original(self, scores, *rest)
            if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                fired()
                values = values.sort(-1, descending=True).values
                experts = experts.sort(-1).values
            return values, experts

        return choose

    with replaced(f"{UPSTREAM}.get_replay_topk", TOPK_PARAMETERS, make):
        yield


@contextlib.contextmanager
def _weights_of_own_choice(fired: Fired) -> Iterator[None]:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def make(original: Any) -> Any:
        def choose(self: Any, scores: Any, topk: int, *rest: Any) -> Any:
            values, experts = original(self, scores, topk, *rest)
            if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                fired()
                *groups, default = rest
                own_values, own = default(scores, topk, *groups)
                values = scores.new_full(scores.shape, UNCHOSEN).scatter(1, own, own_values).gather(1, experts)
            return values, experts

        return choose

    with replaced(f"{UPSTREAM}.get_replay_topk", TOPK_PARAMETERS, make):
        yield


@contextlib.contextmanager
def _one_router_ignores_routes(fired: Fired) -> Iterator[None]:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def make(original: Any) -> Any:
        def choose(self: Any, scores: Any, topk: int, *rest: Any) -> Any:
            if self.layer_number == 2 and self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                fired()
                *groups, default = rest
                return default(scores, topk, *groups)
            return original(self, scores, topk, *rest)

        return choose

    with replaced(f"{UPSTREAM}.get_replay_topk", TOPK_PARAMETERS, make):
        yield


def _fault(
    name: str,
    reproduces: str,
    summary: str,
    inject: Inject,
    *,
    caught_by: tuple[str, ...] = ("RPL001", "RPL002"),
    model: str = "tiny:qwen3-moe",
    mesh: Mesh = SHARDS,
) -> Fault:
    return Fault(
        id=name, stage=Stage.REPLAY, reproduces=reproduces, summary=summary, caught_by=caught_by, inject=inject,
        model=model, mesh=mesh, engine=NO_ENGINE,
    )  # fmt: skip


FAULTS = (
    _fault(
        "routes-count-dense-layers",
        "verl-project/verl#5037",
        "routes are numbered by layer and routers by router: each is off by one behind a dense layer",
        _columns_moved(_dense_layers_counted),
        model="tiny:deepseek-v3",
        mesh=STAGES,
    ),
    _fault(
        "routes-counted-from-the-stage",
        "verl-project/verl#7106",
        "layers are numbered within their pipeline stage, so the second stage gets the first one's routes",
        _columns_moved(_counted_from_stage),
        model="tiny:deepseek-v3",
        mesh=STAGES,
    ),
    _fault(
        "routes-not-cut-in-zigzag",
        "THUDM/slime#2175",
        "routes are cut into contiguous parts while context parallelism cuts tokens in zigzag chunks",
        on_shards(_contiguous_rows),
    ),
    _fault(
        "routes-without-inner-padding",
        "verl-project/verl#7106",
        "tokens are padded sample by sample and routes at the end of the pack, so later samples' are shifted",
        on_packs(_padding_at_the_end),
    ),
    _fault(
        "routes-of-the-first-slice",
        "verl-project/verl#7106",
        "under sequence parallelism every rank replays the first rank's slice of the routes",
        _first_slice_on_all,
    ),
    _fault(
        "routes-suffix-stale",
        "THUDM/slime#1052",
        "the last tokens, which the engine did not report, get the routes of the token before them",
        on_rollouts(_stale_suffix),
    ),
    _fault(
        "routes-of-rejected-sample",
        "NovaSky-AI/SkyRL#1908",
        "a sample is replaced, and keeps the routes of the one that was rejected",
        on_rollouts(_routes_of_the_rejected),
    ),
    _fault(
        "routers-bound-in-another-order",
        "radixark/miles#2570",
        "routes are handed to routers in the order of a list, which is not that of the layers",
        _bound_in_another_order,
    ),
    _fault(
        "replay-outlives-its-pass",
        "NovaSky-AI/SkyRL#1908",
        "routes of a pass that only scored are not cleared, and the next pass replays them where counts are equal",
        _kept_after_the_pass,
        caught_by=("RPL002",),
    ),
    _fault(
        "experts-replayed-without-weights",
        "radixark/miles#2722",
        "the experts are forced and their gate weights are those of another order",
        _weights_in_another_order,
        caught_by=("RPL002",),
    ),
    _fault(
        "gates-of-the-routers-own-choice",
        "ISEEKYAN/Megatron-LM#49 (found in review)",
        "gate weights are those of the router's own choice, and zero for an expert that only the route names",
        _weights_of_own_choice,
        caught_by=("RPL003",),
    ),
    _fault(
        "router-takes-no-routes",
        "NVIDIA/Megatron-LM core_v0.19.2, moe_utils.py, topk_routing_with_score_function: the fused path",
        "one kind of router has no path for replay, and chooses by itself without a word; one layer",
        _one_router_ignores_routes,
        caught_by=("RPL001",),
    ),
)
