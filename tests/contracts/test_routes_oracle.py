"""transformers' routers of every family with experts can be told what to choose, and what they are told matters."""

from __future__ import annotations

import math

import pytest
import torch

from verifier.errors import ContractError
from verifier.model.tiny import write_tiny
from verifier.model.transformers_hf import load_model, token_logprobs
from verifier.oracle.logprob_hf import score
from verifier.oracle.policy_hf import _loss
from verifier.oracle.routes_hf import choosing, chosen_experts, mixtures_of
from verifier.oracle.updates import REINFORCE

FAMILIES = ("qwen3-moe", "deepseek-v3", "nemotron-h")
TOKENS = [(7 * at) % 61 for at in range(12)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory):
    return {name: write_tiny(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def natural_routes(model):
    """What the routers choose for themselves: rows of position, layer, experts."""
    rows, hooks = [], []
    for layer, block in mixtures_of(model).items():

        def look(_, inputs, layer=layer):
            rows.extend([at, layer, *chosen] for at, chosen in enumerate(inputs[1].tolist()))

        hooks.append(block.experts.register_forward_pre_hook(look))
    token_logprobs(model, TOKENS, torch.float64)
    for hook in hooks:
        hook.remove()
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_natural_routes_change_no_bit_and_others_do(paths, family) -> None:
    model = load_model(paths[family], torch.float32)
    natural = natural_routes(model)
    (free,) = score(None, str(paths[family]), [TOKENS], "float32")
    assert score(None, str(paths[family]), [TOKENS], "float32", routes=[natural]) == [free]
    others = [[at, layer, *sorted((expert + 1) % 8 for expert in chosen)] for at, layer, *chosen in natural]
    (told,) = score(None, str(paths[family]), [TOKENS], "float32", routes=[others])
    assert max(abs(one - other) for one, other in zip(told, free, strict=True)) > 1e-3
    assert score(None, str(paths[family]), [TOKENS], "float32") == [free]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_go_by_routes_too(paths, family) -> None:
    rows = natural_routes(load_model(paths[family], torch.float32))
    columns = {
        "tokens": torch.tensor(TOKENS), "mask": torch.arange(12) > 2, "weight": torch.full((12,), 1 / 9).double(),
        "advantage": torch.ones(12), "divisor": -torch.ones(12), "reference": -torch.ones(12),
    }  # fmt: skip
    objective = {**REINFORCE, "temperature": 1.25, "entropy_weight": 0.1, "kl_weight": 0.05}
    free, told, other = {}, {}, {}

    def computed(into, routes):
        row = columns | ({"routes": torch.tensor(routes), "margin": torch.tensor(math.inf)} if routes else {})
        told = [row], objective, torch.float64, lambda name, parts: into.update({name: parts[0]})
        return _loss(paths[family], *told, from_first=True).nats

    nats, told_nats = computed(free, []), computed(told, rows)
    assert told_nats.equal(nats)
    assert free.keys() == told.keys()
    assert all(told[name].equal(gradient) for name, gradient in free.items())
    last, layer, *chosen = rows[-2]
    computed(other, [*rows[:-2], [last, layer, *((at + 1) % 8 for at in chosen)], rows[-1]])
    router = next(name for name in free if f".{layer}." in name and ".gate.weight" in name)
    assert other[router].any()
    assert not other[router].equal(free[router])


def test_a_router_that_is_not_asked_is_refused(paths) -> None:
    model = load_model(paths["qwen3-moe"], torch.float32)
    rows = natural_routes(model)
    with (
        pytest.raises(ContractError, match="1 of 2 routers"),
        choosing(model, chosen_experts([row for row in rows if row[1] == rows[0][1]] + [rows[-1]], 12)),
    ):
        mixtures_of(model)[rows[0][1]](torch.zeros(1, 12, model.config.hidden_size))


@pytest.mark.parametrize("family", FAMILIES)
def test_within_a_margin_a_router_is_given_what_it_nearly_chooses_alone(paths, family) -> None:
    model = load_model(paths[family], torch.float32)
    rows = natural_routes(model)
    last, layer, *chosen = rows[-2]
    tokens = torch.tensor([TOKENS])

    def told(expert: int) -> list[list[int]]:
        others = {(last, layer): [*chosen[1:], expert]}
        return [[position, at, *others.get((position, at), own)] for position, at, *own in rows]

    def logits(given: list[list[int]], margin: float) -> torch.Tensor:
        with torch.no_grad(), choosing(model, chosen_experts(given, len(TOKENS)), margin):
            return model(tokens).logits

    own = logits(rows, 0.0)
    others = [told(expert) for expert in range(8) if expert not in chosen]
    assert all(logits(given, 1e-5).equal(own) for given in others)
    assert any(not logits(given, 2.0).equal(own) for given in others)  # all scores of open groups lie within twice
    assert all(not logits(given, float("inf")).equal(own) for given in others)
