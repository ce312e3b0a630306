"""Replayed routes: every (token, layer) once over all stages and shards, never another's, never a made-up one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier.data.rollout import MISSING_ROUTE
from verifier.errors import ContractError
from verifier.megatron.pack import PADDING, pack, shard_cp
from verifier.megatron.router_replay import packed_rows_of, replay_routes
from verifier.mesh import Mesh
from verifier.strategies import Packing, packings, stages

TOPK = 2
SPREAD = 37
"""Coprime with every number of experts: neighbours in a route stay different ones."""


@given(
    case=packings(without_sp=True, max_tp=3, max_cp=3, max_rollouts=3, max_tokens=12, num_moe_layers=1),
    stage=stages(max_pp=4, max_layers=10),
    dense=st.integers(0, 3),
    num_experts=st.sampled_from([8, 320]),
    data=st.data(),
)
def test_every_route_is_replayed_once_in_its_own_layer(
    case: Packing, stage: tuple, dense: int, num_experts: int, data: st.DataObject
) -> None:
    shape, num_layers = stage
    mesh = Mesh(**{**shape.to_dict(), "tp": case.alignment.tp, "cp": case.alignment.cp})
    moe_layers = range(min(dense, num_layers - 1), num_layers)
    for item in case.rollouts:
        columns = [torch.from_numpy(item.routes[:, 0].astype("int64")) + 3 * at for at in range(len(moe_layers))]
        routes = torch.stack(columns, 1) * SPREAD % num_experts
        routes[-1] = MISSING_ROUTE if data.draw(st.booleans()) else torch.tensor([3, 5])
        object.__setattr__(item, "routes", routes.numpy())
    packed = pack(case.rollouts, case.alignment)
    seen: dict[tuple[int, int], list[int]] = {}
    counts = torch.zeros(num_layers, num_experts, dtype=torch.long)
    for cp in range(mesh.cp):
        shard = shard_cp(packed, cp)
        for tp in range(mesh.tp if case.alignment.sp else 1):
            held = packed_rows_of(shard, tp)
            for pp in range(mesh.pp):
                for chunk in range(mesh.vpp):
                    replay = replay_routes(
                        shard, tp=tp, layers=mesh.layers_of(pp, chunk, num_layers), moe_layers=moe_layers,
                        num_experts=num_experts, topk=TOPK,
                    )  # fmt: skip
                    assert replay.free_T[shard.segments_T[held] == PADDING].all()
                    for layer, experts in replay.experts.items():
                        assert layer in mesh.layers_of(pp, chunk, num_layers)
                        assert (experts.sort(-1).values.diff(dim=-1) > 0).all()
                        counts[layer] += torch.bincount(experts[~replay.free_T].flatten(), minlength=num_experts)
                        for row, free, chosen in zip(shard.rows_T[held], replay.free_T, experts, strict=True):
                            assert (int(row), layer) not in seen
                            seen[int(row), layer] = [] if free else chosen.tolist()
    assert len(seen) == packed.num_rows * len(moe_layers)
    live = 0
    for row in range(packed.num_rows):
        segment, position = int(packed.segments_T[row]), int(packed.positions_T[row])
        for column, layer in enumerate(moe_layers):
            routed = segment != PADDING and case.rollouts[segment].routes[position, column, 0] != MISSING_ROUTE
            expected = case.rollouts[segment].routes[position, column].tolist() if routed else []
            assert seen[row, layer] == expected
        live += bool(routed)
    assert counts[list(moe_layers)].sum(-1).tolist() == [live * TOPK] * len(moe_layers)


def _replay(packed, **changes):
    settings = {"tp": 0, "layers": range(1), "moe_layers": [0], "num_experts": 8, "topk": 2}
    return replay_routes(packed, **{**settings, **changes})


@given(case=packings(without_sp=True, max_tp=1, max_cp=1, num_moe_layers=1), data=st.data())
def test_a_missing_route_that_is_needed_is_an_error_naming_its_place(case: Packing, data: st.DataObject) -> None:
    long = [item for item in case.rollouts if len(item) > 1]
    if not long:
        return
    victim = data.draw(st.sampled_from(long))
    position = data.draw(st.integers(0, len(victim) - 2))
    victim.routes[position, 0, data.draw(st.integers(0, 1))] = MISSING_ROUTE
    with pytest.raises(
        ContractError, match=f"rollout `{victim.id}`, token {position}, layer 0: the engine reported no"
    ):
        _replay(pack(case.rollouts, case.alignment))


@pytest.mark.parametrize("experts", [[3, 3], [3, 8], [3, -2]])
def test_an_impossible_choice_is_an_error(experts: list[int]) -> None:
    import numpy as np

    from verifier.data.rollout import make_rollout
    from verifier.megatron.token_layout import Alignment

    routes = np.array([[[0, 1]], [experts], [[4, 5]]], np.int16)
    packed = pack([make_rollout("a", [1], [2, 3], routes=routes)], Alignment())
    with pytest.raises(ContractError, match="rollout `a`, token 1, layer 0: experts"):
        _replay(packed)
