"""Routers of megatron-core on ranks: what they choose is seen, recorded, or set.

Routers are found in the model's chunks and identified by global layer number. Megatron's process-wide list of replay
instances is not used: it is in order of construction and keeps those of deleted models.

Shape suffixes as in `verifier.megatron.router_replay`; N real tokens, E experts of a layer.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from verifier.data.rollout import MISSING_ROUTE, Rollout
from verifier.errors import ContractError
from verifier.megatron.pack import PADDING, PackedBatch
from verifier.megatron.router_replay import replay_routes
from verifier.megatron.step_megatron import score
from verifier.model.provider_megatron import TrainerModel
from verifier.platform.gather_json import gather_json

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

PROVIDER_FIELDS = {"moe_enable_routing_replay": True, "moe_router_fusion": False}
"""Provider fields that replay needs; the fused router of megatron-core 0.19.2 silently ignores routes."""
EveryRow = Mapping[tuple[int, int], list[torch.Tensor]]
"""(virtual stage, global layer) -> experts [T, K] of each micro-batch of this rank, padding included."""


class Routing:
    """Routers of one rank and global numbers of all layers with routers. The constructor is a collective.

    The trainer is built with `PROVIDER_FIELDS` where its routers are to obey or to record.
    """

    def __init__(self, trainer: TrainerModel) -> None:
        self.trainer = trainer
        self.at = trainer.mesh.coordinate(dist.get_rank())
        self.routers = [routers_of(chunk) for chunk in trainer.chunks]
        found = gather_json([layer for held in self.routers for layer in held])
        self.moe_layers = sorted({layer for held in found for layer in held})
        self.num_experts = int(trainer.provider.num_moe_experts)
        self.topk = int(trainer.provider.moe_router_topk)

    def score_naturally(self, rollouts: Sequence[Rollout]) -> tuple[list[torch.Tensor], list[Rollout], EveryRow]:
        """Score and record what the routers choose by themselves. A collective.

        Returns:
            (result of `step_megatron.score`, rollouts with routes [L, M, K] in the routers' order, choices for every
            row of this rank).
        """
        with RouterPass(self, rollouts, replay=False) as seen:
            scored = score(self.trainer, rollouts, on_shards=seen.on_shards)
        rows = np.array([row for rows in gather_json(seen.choices().tolist()) for row in rows], np.int32)
        rows = rows.reshape(-1, 3 + self.topk)
        sequence, position, layer = rows[:, :3].T
        column = np.searchsorted(self.moe_layers, layer)
        routed = []
        for index, rollout in enumerate(rollouts):
            routes = np.full((len(rollout), len(self.moe_layers), self.topk), MISSING_ROUTE, np.int32)
            mine = sequence == index
            routes[position[mine], column[mine]] = rows[mine, 3:]
            routed.append(replace(rollout, routes=routes))
        return scored, routed, seen.every_row

    def score_replaying(
        self, rollouts: Sequence[Rollout], stand_ins: EveryRow | None = None
    ) -> tuple[list[torch.Tensor], np.ndarray]:
        """Score with every router choosing the rollouts' routes. A collective.

        Returns:
            (result of `step_megatron.score`, choices of this rank's routers as `RouterPass.choices`).
        """
        with RouterPass(self, rollouts, stand_ins=stand_ins) as seen:
            scored = score(self.trainer, rollouts, on_shards=seen.on_shards)
        return scored, seen.choices()


class RouterWatch:
    """One pass over rollouts in which it sees which experts each of this rank's routers uses for which token.

    Where activations are recomputed, a router runs twice for each micro-batch, each time in the same order of them.
    """

    def __init__(self, routing: Routing, rollouts: Sequence[Rollout]) -> None:
        self._routing = routing
        self._index = {rollout.id: index for index, rollout in enumerate(rollouts)}
        self._shards: dict[int, PackedBatch] = {}
        self._left: list[Iterator[PackedBatch]] = []
        self._seen: list[np.ndarray] = []
        self._seen_again: list[np.ndarray] = []
        self._run: dict[tuple[int, int], deque[PackedBatch]] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> RouterWatch:
        for chunk, (model, routers) in enumerate(zip(self._routing.trainer.chunks, self._routing.routers, strict=True)):
            hook = model.register_forward_pre_hook(lambda *_, chunk=chunk: self._begin(chunk))
            self._undo.callback(hook.remove)
            for router in routers.values():
                self._prepare(router)
                hook = router.register_forward_hook(
                    lambda router, _, output, chunk=chunk: self._look(chunk, router, output[1])
                )
                self._undo.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def on_shards(self, shards: list[PackedBatch]) -> None:
        """Take the pass's micro-batches, which every chunk sees in this order, before it begins."""
        self._left = [iter(shards) for _ in self._routing.routers]

    def choices(self) -> np.ndarray:
        """Return [N, 3 + K] int32, per token and layer: index of the rollout, position, global layer, K experts.

        Experts are in ascending order, unless they are those that `RouterPass` has recorded.
        """
        return np.concatenate(self._seen or [np.zeros((0, 3 + self._routing.topk), np.int32)])

    def recomputed(self) -> np.ndarray:
        """Return what `choices` does of runs for gradients; no rows where nothing was recomputed."""
        return np.concatenate(self._seen_again or [np.zeros((0, 3 + self._routing.topk), np.int32)])

    def _prepare(self, router: TopKRouter) -> None:
        """Make a router ready for the pass; nothing is to do where it is watched alone."""

    def _begin(self, chunk: int) -> None:
        """A chunk runs its next micro-batch."""
        self._shards[chunk] = next(self._left[chunk])

    def _recomputes(self) -> bool:
        """True in a pass that Megatron runs again for its gradients: it first ran without any."""
        provider = self._routing.trainer.provider
        selected = provider.recompute_modules if provider.recompute_granularity == "selective" else []
        return (provider.recompute_granularity == "full" or "moe" in (selected or ())) and torch.is_grad_enabled()

    def _experts(self, chunk: int, router: TopKRouter, routing_map_TE: torch.Tensor) -> torch.Tensor:
        """[T, K] experts that a router has used for each row, on the host."""
        num_experts = routing_map_TE.shape[1]
        used_TE = torch.where(routing_map_TE, torch.arange(num_experts, device=routing_map_TE.device), num_experts)
        experts_TK = used_TE.sort(-1).values[:, : self._routing.topk]
        return torch.where(experts_TK == num_experts, MISSING_ROUTE, experts_TK).cpu()

    def _look(self, chunk: int, router: TopKRouter, routing_map_TE: torch.Tensor) -> None:
        layer, num_rows = router.layer_number - 1, len(routing_map_TE)
        run = self._run.setdefault((chunk, layer), deque())
        again = self._recomputes() and bool(run)
        shard = run.popleft() if again else self._shards[chunk]
        if not again and not torch.is_grad_enabled():
            run.append(shard)
        # With sequence parallelism each tensor-parallel rank has an equal run of the rows.
        begin = self._routing.at.tp * num_rows if num_rows < shard.num_rows else 0
        rows = slice(begin, begin + num_rows)
        experts_TK = self._experts(chunk, router, routing_map_TE)
        real_T = shard.segments_T[rows] != PADDING
        index_S = torch.tensor([self._index[item] for item in shard.ids], dtype=torch.int64)
        index_N = index_S[shard.segments_T[rows][real_T].long()]
        where_N3 = torch.stack([index_N, shard.positions_T[rows][real_T], torch.full_like(index_N, layer)], dim=-1)
        seen = self._seen_again if again else self._seen
        seen.append(torch.cat([where_N3, experts_TK[real_T].long()], dim=-1).int().numpy())


class RouterPass(RouterWatch):
    """A pass in which routers obey the rollouts' routes, or choose by themselves and record the order of experts.

    Afterwards routers choose by themselves and keep nothing. A router that runs again for its gradients obeys the same
    routes as before. `stand_ins` are choices from `score_naturally` for the same rollouts, for rows without a route
    such as padding; None uses the experts 0 to K - 1. Some kernels give a token the same bits only if all rows are the
    same, as they split a matrix product by its number of rows or sum time steps over all rows of a chunk.

    Attributes:
        every_row: unless replayed, choices for all rows that the routers saw, in the routers' order.

    Raises:
        ContractError: a router was built without replay.
    """

    def __init__(
        self, routing: Routing, rollouts: Sequence[Rollout], *, replay: bool = True, stand_ins: EveryRow | None = None
    ) -> None:
        super().__init__(routing, rollouts)
        self._replay = replay
        self._stand_ins = stand_ins and {place: iter(rows) for place, rows in stand_ins.items()}
        self.every_row: dict[tuple[int, int], list[torch.Tensor]] = {}

    def _prepare(self, router: TopKRouter) -> None:
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        instance = router.router_replay
        if instance is None:
            raise ContractError(
                f"the router of layer {router.layer_number - 1} was built without replay: see `PROVIDER_FIELDS`"
            )
        instance.set_router_replay_action(
            RouterReplayAction.REPLAY_FORWARD if self._replay else RouterReplayAction.RECORD
        )
        self._undo.callback(instance.clear_indices)
        self._undo.callback(instance.clear_router_replay_action)
        if self._replay:
            hook = router.register_forward_pre_hook(lambda router, _: self._choose_routes(router))
            self._undo.callback(hook.remove)

    def _begin(self, chunk: int) -> None:
        """A chunk runs its next micro-batch: hand its routers their experts."""
        super()._begin(chunk)
        if not self._replay:
            return
        routing, at, mesh = self._routing, self._routing.at, self._routing.trainer.mesh
        routers = routing.routers[chunk]
        layers = mesh.layers_of(at.pp, chunk, int(routing.trainer.provider.num_layers))
        replay = replay_routes(
            self._shards[chunk], tp=at.tp, layers=layers, moe_layers=routing.moe_layers,
            num_experts=routing.num_experts, topk=routing.topk,
        )  # fmt: skip
        if replay.experts.keys() != routers.keys():
            raise ContractError(
                f"stage {at.pp}, chunk {chunk} has routers in layers {sorted(routers)}, "
                f"routes are for layers {sorted(replay.experts)}"
            )
        for layer, router in routers.items():
            experts_TK = replay.experts[layer]
            if self._stand_ins is not None:
                experts_TK = torch.where(replay.free_T.unsqueeze(-1), next(self._stand_ins[chunk, layer]), experts_TK)
            router.router_replay.set_target_indices(experts_TK)

    def _choose_routes(self, router: TopKRouter) -> None:
        """Obey the routes set last, or when activations are recomputed the earliest of those not yet used again."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        again = self._recomputes()
        action = RouterReplayAction.REPLAY_BACKWARD if again else RouterReplayAction.REPLAY_FORWARD
        router.router_replay.set_router_replay_action(action)

    def _experts(self, chunk: int, router: TopKRouter, routing_map_TE: torch.Tensor) -> torch.Tensor:
        """Experts as `RouterWatch`, or as recorded: in the router's order."""
        if self._replay:
            return super()._experts(chunk, router, routing_map_TE)
        experts_TK = router.router_replay.get_recorded_indices().cpu()
        self.every_row.setdefault((chunk, router.layer_number - 1), []).append(experts_TK)
        return experts_TK


def routers_of(chunk: torch.nn.Module) -> dict[int, TopKRouter]:
    """Return the routers of one model chunk by global layer index, ascending; MTP layers are numbered from 1 again."""
    from megatron.core.transformer.moe.router import TopKRouter

    named = (module for name, module in chunk.named_modules() if ".mtp." not in f".{name}")
    found = {module.layer_number - 1: module for module in named if isinstance(module, TopKRouter)}
    return dict(sorted(found.items()))
