"""Router replay (R3): experts that each router of a rank must choose, from the routes that the engine reported.

Shape suffixes: T rows that this rank's routers see, M mixture-of-experts layers in global order, K experts per token.

Routes are packed with the tokens (verifier/megatron/pack.py), so context-parallel shards contain their own. This module
selects the layers of the pipeline stage, by global layer number, and the rows of the sequence-parallel rank.
"""
# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verifier.data.rollout import MISSING_ROUTE
from verifier.errors import ContractError
from verifier.megatron.pack import PADDING, PackedBatch
from verifier.megatron.token_layout import sp_slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Experts for the routers of one virtual pipeline stage on one rank."""

    experts: Mapping[int, torch.Tensor]
    """Global layer index -> [T, K] int64, in layer order, for the layers of this stage that have a router."""
    free_T: torch.Tensor
    """bool, rows with a stand-in route: padding, and last tokens that the engine did not route. Expert statistics must
    leave them out."""


def replay_routes(
    packed: PackedBatch,
    *,
    tp: int,
    layers: range,
    moe_layers: Sequence[int],
    num_experts: int,
    topk: int,
) -> Replay:
    """Return the experts that the routers of one stage must choose for one micro-batch.

    The engine does not run the last token of a rollout through the model, so only its route may be missing; no trained
    token depends on it. Such rows and padding get the experts 0 to K - 1 and are marked in `free_T`.

    Args:
        packed: shard of this context-parallel rank.
        tp: tensor-parallel rank; with sequence parallelism it routes its slice of the rows.
        layers: global indices of the stage's layers, dense ones included.
        moe_layers: global indices of the layers with routers, ascending, in the order of the routes' M axis.
        num_experts: number of experts of each such layer.
        topk: number of experts per token, K.

    Raises:
        ContractError: the pack has no routes or routes of another shape; or a needed route is missing, repeats an
            expert or has one that does not exist.

    Source:
        SkyRL, utils/replay_utils.py: global layer numbers, because dense layers have no router (verl #5037 counted them
        and was off by one); distinct stand-ins for padding rows, because dropless dispatch counts them.
    """
    held = packed_rows_of(packed, tp)
    segments_T = packed.segments_T[held].long()
    padding_T = segments_T == PADDING
    last_T = packed.positions_T[held] == torch.diff(packed.cu_seqlens)[segments_T.clamp(min=0)] - 1
    if packed.ids:
        routes_TMK = _routes_of(packed, len(moe_layers), topk)[held].long()
    else:
        routes_TMK = torch.full((len(segments_T), len(moe_layers), topk), MISSING_ROUTE)
    missing_TM = (routes_TMK == MISSING_ROUTE).any(-1)
    stood_in_TM = missing_TM & (padding_T | last_T).unsqueeze(-1)
    routes_TMK = torch.where(stood_in_TM.unsqueeze(-1), torch.arange(topk), routes_TMK)
    experts = {layer: routes_TMK[:, column] for column, layer in enumerate(moe_layers) if layer in layers}
    for layer, routes_TK in experts.items():
        _refuse_unusable(packed, held, routes_TK, layer, num_experts)
    return Replay(experts=experts, free_T=padding_T | (last_T & missing_TM.any(-1)))


def packed_rows_of(packed: PackedBatch, tp: int) -> slice:
    """Return the rows of a context-parallel shard that one tensor-parallel rank's routers see."""
    return sp_slice(packed.num_rows, packed.alignment.tp, tp) if packed.alignment.sp else slice(0, packed.num_rows)


def _routes_of(packed: PackedBatch, num_moe_layers: int, topk: int) -> torch.Tensor:
    if packed.routes_TMK is None:
        raise ContractError(f"rollout `{packed.ids[0]}` has no routes to replay: the engine must report routed experts")
    if packed.routes_TMK.shape[1:] != (num_moe_layers, topk):
        raise ContractError(
            f"rollout `{packed.ids[0]}` has routes of [layers, experts per token] = "
            f"{list(packed.routes_TMK.shape[1:])}, the model has {[num_moe_layers, topk]}: dense layers have no routes"
        )
    return packed.routes_TMK


def _refuse_unusable(packed: PackedBatch, held: slice, routes_TK: torch.Tensor, layer: int, num_experts: int) -> None:
    ordered_TK = routes_TK.sort(-1).values
    outside_T = (ordered_TK[:, 0] < 0) | (ordered_TK[:, -1] >= num_experts)
    wrong_T = outside_T | (ordered_TK.diff(dim=-1) == 0).any(-1)
    if not wrong_T.any():
        return
    row = int(wrong_T.int().argmax())
    at = held.start + row
    where = f"rollout `{packed.ids[int(packed.segments_T[at])]}`, token {int(packed.positions_T[at])}, layer {layer}"
    if (routes_TK[row] == MISSING_ROUTE).any():
        raise ContractError(f"{where}: the engine reported no route, and only a rollout's last token may lack one")
    raise ContractError(
        f"{where}: experts {routes_TK[row].tolist()} are not {routes_TK.shape[1]} different ones below {num_experts}"
    )
