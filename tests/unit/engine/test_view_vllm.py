"""Parts of checkpoint tensors that one of several vLLM ranks says it holds, and its share of a mixture's output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn


def module_of(kind: type, **attributes: object) -> nn.Module:
    """A module of vLLM's without the process groups that its constructor asks."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, nn.Parameter(value, requires_grad=False) if "weight" in name else value)
    return module


def boxes(model: nn.Module) -> dict[str, tuple[tuple[int, int], ...]]:
    """Checkpoint tensor -> box of this rank; of a tensor that two places hold, the last."""
    from verifier.engine.vllm.view_vllm import checkpoint_slices

    return {item.name: item.box for item in checkpoint_slices(model, frozenset())}


def test_a_rank_has_its_own_experts_and_an_empty_part_of_the_others():
    from verifier.engine.vllm.experts_vllm import LAYER

    class Experts(LAYER):
        expert_map = None  # vLLM 0.21 has a property, of what its constructor keeps

    parallel = SimpleNamespace(tp_rank=0)
    experts = module_of(
        Experts, global_num_experts=4, expert_map=torch.tensor([-1, -1, 0, 1]), w13_weight=torch.ones(2, 6, 5),
        w2_weight=torch.ones(2, 5, 3), moe_config=SimpleNamespace(is_act_and_mul=True, moe_parallel_config=parallel),
    )  # fmt: skip
    found = boxes(nn.ModuleDict({"experts": experts}))
    assert len(found) == 12
    for expert in range(4):
        rows = 3 if expert > 1 else 0
        assert found[f"experts.{expert}.gate_proj.weight"] == found[f"experts.{expert}.up_proj.weight"]
        assert found[f"experts.{expert}.gate_proj.weight"] == ((0, rows), (0, 5))
        assert found[f"experts.{expert}.down_proj.weight"] == ((0, 5), (0, rows))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_adapter_is_cut_where_its_linear_is(rank):
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    sizes = {"tp_rank": rank, "input_size_per_partition": 4, "output_size_per_partition": 3, "bias": None}
    model = nn.ModuleDict()
    for name, kind, shape in (("up", ColumnParallelLinear, (3, 8)), ("down", RowParallelLinear, (6, 4))):
        base = module_of(kind, weight=torch.ones(shape), **sizes)
        model[name] = nn.Module()
        model[name].base_layer = base
        model[name].lora_a_stacked = (torch.ones(1, 1, 2, shape[1]),)
        model[name].lora_b_stacked = (torch.ones(1, 1, shape[0], 2),)
    begin, end = 4 * rank, 4 * rank + 4
    assert boxes(model) == {
        "up.weight": ((3 * rank, 3 * rank + 3), (0, 8)),
        "up.lora_A.weight": ((0, 2), (0, 8)), "up.lora_B.weight": ((3 * rank, 3 * rank + 3), (0, 2)),
        "down.weight": ((0, 6), (begin, end)),
        "down.lora_A.weight": ((0, 2), (begin, end)), "down.lora_B.weight": ((0, 6), (0, 2)),
    }  # fmt: skip


def test_ranks_of_experts_add_up_to_the_mixture():
    from verifier.engine.vllm.experts_vllm import of_rank

    torch.manual_seed(1)
    weights, tokens = torch.randn(4, 5, 5), torch.randn(6, 5)
    chosen, shares = torch.rand(6, 4).argsort(dim=1)[:, :2].int(), torch.rand(6, 2)

    def run(self, layer, x, topk_weights, topk_ids, activation, count, skip_weighted=False):
        assert len(layer.weights) == count
        assert activation == "silu"
        mixed = layer.weights[topk_ids.long()] @ x[:, None, :, None]
        return (mixed.squeeze(-1) * topk_weights[..., None]).sum(1)

    def of(held, expert_map):
        layer = SimpleNamespace(weights=held, expert_map=expert_map, local_num_experts=len(held))
        return of_rank(run)(None, layer, tokens, shares, chosen, "silu", 4, False)

    maps = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]])
    torch.testing.assert_close(of(weights[:2], maps[0]) + of(weights[2:], maps[1]), of(weights, None))
    assert not of(weights[:0], torch.full((4,), -1)).any()
