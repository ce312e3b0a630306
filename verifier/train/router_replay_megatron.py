"""Router replay on ranks: sets the choices of megatron-core's routers and records them.

Routers are found in the model's chunks and identified by global layer number. Megatron's process-wide list of replay
instances is not used: it is in order of construction and keeps those of deleted models.

Shape suffixes as in `verifier.train.router_replay`; E experts of a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from verifier.data.rollout import MISSING_ROUTE, Rollout
from verifier.errors import ContractError
from verifier.model.provider_megatron import TrainerModel
from verifier.train.pack import PADDING, PackedBatch
from verifier.train.router_replay import replay_routes
from verifier.train.step_megatron import OnShards, score

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

PROVIDER_FIELDS = {"moe_enable_routing_replay": True, "moe_router_fusion": False}
"""Provider fields that replay needs; the fused router of megatron-core 0.19.2 silently ignores routes."""
EveryRow = dict[tuple[int, int], list[torch.Tensor]]
"""(virtual stage, global layer) -> experts [T, K] of each micro-batch of this rank, padding included."""


class Routing:
    """Routers of one rank and global numbers of all layers with routers. The constructor is a collective.

    Args:
        trainer: trainer built with `PROVIDER_FIELDS`.

    Raises:
        ContractError: a router was built without replay.
    """

    def __init__(self, trainer: TrainerModel) -> None:
        self.trainer = trainer
        self.at = trainer.mesh.coordinate(dist.get_rank())
        self.routers = [routers_of(chunk) for chunk in trainer.chunks]
        found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, sorted(layer for held in self.routers for layer in held))
        self.moe_layers = sorted({layer for held in found for layer in held})
        self.num_experts = int(trainer.provider.num_moe_experts)
        self.topk = int(trainer.provider.moe_router_topk)

    def score_naturally(self, rollouts: Sequence[Rollout]) -> tuple[list[torch.Tensor], list[Rollout], EveryRow]:
        """Score and record what the routers choose by themselves. A collective.

        Returns:
            (result of `step_megatron.score`, rollouts with routes [L, M, K] in the routers' order, choices for every
            row of this rank).
        """
        with self._acting("RECORD"), _RouterProbe(self, rollouts, recorded=True) as probe:
            scored = score(self.trainer, rollouts, on_chunk=probe.on_chunk)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, probe.choices())
        rows = np.concatenate(everyone)
        columns = np.searchsorted(self.moe_layers, rows[:, 2])
        found = []
        for index, rollout in enumerate(rollouts):
            routes = np.full((len(rollout), len(self.moe_layers), self.topk), MISSING_ROUTE, np.int32)
            mine = rows[:, 0] == index
            routes[rows[mine, 1], columns[mine]] = rows[mine, 3:]
            found.append(replace(rollout, routes=routes))
        return scored, found, probe.every_row

    def score_replaying(
        self, rollouts: Sequence[Rollout], stand_ins: EveryRow | None = None
    ) -> tuple[list[torch.Tensor], np.ndarray]:
        """Score with every router choosing the rollouts' routes. A collective.

        Args:
            rollouts: rollouts with routes.
            stand_ins: choices from `score_naturally` for the same rollouts, for rows without a route such as padding;
                None uses the experts 0 to K - 1. Some kernels give a token the same bits only if all rows are the same,
                as they split a matrix product by its number of rows or sum time steps over all rows of a chunk.

        Returns:
            (result of `step_megatron.score`, choices of this rank's routers as `_RouterProbe.choices`).
        """
        rows_left = None if stand_ins is None else {place: iter(rows) for place, rows in stand_ins.items()}
        with self._acting("REPLAY_FORWARD"), _RouterProbe(self, rollouts) as probe:

            def on_chunk(chunk: int, shard: PackedBatch) -> None:
                probe.on_chunk(chunk, shard)
                self._hand_over(chunk, shard, rows_left)

            scored = score(self.trainer, rollouts, on_chunk=on_chunk)
        return scored, probe.choices()

    @contextlib.contextmanager
    def replaying(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[OnShards, _RouterProbe]]:
        """Replay the rollouts' routes in one forward and backward pass within the context.

        Yields:
            (viewer that must see the pass's micro-batches before it begins, probe of the routers' choices).
        """
        left: list[Iterator[PackedBatch]] = []

        def on_shards(shards: list[PackedBatch]) -> None:
            left[:] = [iter(shards) for _ in self.trainer.chunks]

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._acting("REPLAY_FORWARD"))
            probe = stack.enter_context(_RouterProbe(self, rollouts))

            def before(chunk: int) -> None:
                shard = next(left[chunk])
                probe.on_chunk(chunk, shard)
                self._hand_over(chunk, shard, None)

            for at, chunk in enumerate(self.trainer.chunks):
                stack.callback(chunk.register_forward_pre_hook(lambda *_, at=at: before(at)).remove)
            yield on_shards, probe

    def _hand_over(
        self, chunk: int, shard: PackedBatch, rows_left: Mapping[tuple[int, int], Iterator[torch.Tensor]] | None
    ) -> None:
        replay = replay_routes(
            shard, mesh=self.trainer.mesh, pp=self.at.pp, chunk=chunk, tp=self.at.tp,
            num_layers=int(self.trainer.provider.num_layers), moe_layers=self.moe_layers,
            num_experts=self.num_experts, topk=self.topk,
        )  # fmt: skip
        if replay.experts.keys() != self.routers[chunk].keys():
            raise ContractError(
                f"stage {self.at.pp}, chunk {chunk} has routers in layers {sorted(self.routers[chunk])}, "
                f"routes are for layers {sorted(replay.experts)}"
            )
        for layer, router in self.routers[chunk].items():
            experts_TK = replay.experts[layer]
            if rows_left is not None:
                experts_TK = torch.where(replay.free_T.unsqueeze(-1), next(rows_left[chunk, layer]), experts_TK)
            router.router_replay.set_target_indices(experts_TK)

    @contextlib.contextmanager
    def _acting(self, action: str) -> Iterator[None]:
        """Let all routers of this rank record or replay; afterwards they choose by themselves and keep nothing."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        instances = [router.router_replay for held in self.routers for router in held.values()]
        for instance in instances:
            instance.set_router_replay_action(RouterReplayAction[action])
        try:
            yield
        finally:
            for instance in instances:
                instance.clear_router_replay_action()
                instance.clear_indices()


def routers_of(chunk: torch.nn.Module) -> dict[int, TopKRouter]:
    """Return the routers of one model chunk by global layer index, ascending.

    Raises:
        ContractError: a router was built without replay.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    found = {module.layer_number - 1: module for module in chunk.modules() if isinstance(module, TopKRouter)}
    for layer, router in found.items():
        if router.router_replay is None:
            raise ContractError(f"the router of layer {layer} was built without replay: see `PROVIDER_FIELDS`")
    return dict(sorted(found.items()))


class _RouterProbe:
    """Records which experts each router used for which token, without changing anything.

    Args:
        routing: routers of this rank.
        rollouts: rollouts that are scored.
        recorded: whether to read the choices that routers recorded, in their order; otherwise those in their output, in
            ascending order.

    Attributes:
        every_row: choices for all rows that the routers saw, if `recorded`.
    """

    def __init__(self, routing: Routing, rollouts: Sequence[Rollout], *, recorded: bool = False) -> None:
        self._routing, self._recorded = routing, recorded
        self._index = {rollout.id: index for index, rollout in enumerate(rollouts)}
        self._shards: dict[int, PackedBatch] = {}
        self._seen: list[np.ndarray] = []
        self.every_row: EveryRow = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> _RouterProbe:
        for chunk, held in enumerate(self._routing.routers):
            for router in held.values():
                handle = router.register_forward_hook(
                    lambda module, _, output, chunk=chunk: self._look(chunk, module, output[1])
                )
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def on_chunk(self, chunk: int, shard: PackedBatch) -> None:
        """Set the shard whose rows this chunk's routers see next."""
        self._shards[chunk] = shard

    def choices(self) -> np.ndarray:
        """Return [N, 3 + K] int32, per token and layer: index of the rollout, position, global layer, K experts."""
        return np.concatenate(self._seen or [np.zeros((0, 3 + self._routing.topk), np.int32)])

    def _look(self, chunk: int, router: TopKRouter, routing_map_TE: torch.Tensor) -> None:
        shard, topk = self._shards[chunk], self._routing.topk
        num_rows, num_experts = routing_map_TE.shape
        # With sequence parallelism each tensor-parallel rank has an equal run of the rows.
        begin = self._routing.at.tp * num_rows if num_rows < shard.num_rows else 0
        segments_T = shard.segments_T[begin : begin + num_rows]
        real_T = segments_T != PADDING
        if self._recorded:
            experts_TK = router.router_replay.get_recorded_indices()
            self.every_row.setdefault((chunk, router.layer_number - 1), []).append(experts_TK.cpu())
        else:
            used_TE = torch.where(routing_map_TE, torch.arange(num_experts, device=routing_map_TE.device), num_experts)
            experts_TK = used_TE.sort(-1).values[:, :topk]
            experts_TK = torch.where(experts_TK == num_experts, MISSING_ROUTE, experts_TK)
        indices = torch.tensor([self._index[item] for item in shard.ids], dtype=torch.int64)
        where_N3 = torch.stack(
            [
                indices[segments_T[real_T].long()] if shard.ids else segments_T[real_T].long(),
                shard.positions_T[begin : begin + num_rows][real_T],
                torch.full((int(real_T.sum()),), router.layer_number - 1),
            ],
            dim=-1,
        )
        self._seen.append(torch.cat([where_N3, experts_TK.cpu()[real_T].long()], dim=-1).int().numpy())
