"""What routers' own losses add to the gradient of their logits, as the probe reads it off a router in an update.

What this does not exercise: Megatron's routers (tests/dist/test_train_clean.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verifier.stages.loss import probe_router_losses_megatron as probes


class Router(torch.nn.Module):
    """Sigmoid scores with a bias that decides the choice alone, and no losses of its own."""

    def __init__(self, bias):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[0.4], [0.3], [0.2], [0.1]], dtype=torch.float64))
        self.topk, self.score_function, self.expert_bias = 2, "sigmoid", bias
        self.config = SimpleNamespace(
            moe_router_pre_softmax=False, moe_router_num_groups=None, moe_router_group_topk=None,
            moe_router_topk_scaling_factor=None,
        )  # fmt: skip

    def gating(self, states):
        return states @ self.weight.T

    def forward(self, states):
        logits = self.gating(states)
        scores = logits.sigmoid()
        at = (scores + self.expert_bias).topk(self.topk).indices
        chosen = torch.zeros_like(scores).scatter(1, at, scores.gather(1, at))
        return chosen / chosen.sum(-1, keepdim=True), at


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_score_biases_that_the_update_moves_are_read_as_they_were_in_the_pass(monkeypatch, moved):
    router = Router(torch.zeros(4))
    trainer = SimpleNamespace(chunks=[router], mesh=SimpleNamespace(coordinate=lambda rank: "dp=0"))
    monkeypatch.setattr(probes, "routers_of", lambda chunk: {1: chunk})
    monkeypatch.setattr(probes.dist, "get_rank", lambda: 0)
    found = []
    probe = SimpleNamespace(emit=lambda record, arrays: found.append(arrays["found"]))
    with probes.router_losses(probe, trainer, "update 1", 1):
        weights, _ = router(torch.ones(3, 1, dtype=torch.float64))
        (weights * torch.arange(4.0)).sum().backward()
        router.expert_bias += torch.tensor([0.0, 0.0, 0.0, moved])
    assert found[0].abs().max() < 1e-6
