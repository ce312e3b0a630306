"""Chosen experts against transformers' scores of all: its own choice is the best, and another is told by how much.

What this does not exercise: routes of a trainer (`experts-chosen-without-score-bias` and clean runs have them).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verifier.model.named import resolve_model
from verifier.model.transformers_hf import load_model
from verifier.oracle.choices_hf import choice_gaps
from verifier.oracle.routes_hf import mixtures_of
from verifier.runs.model_under_test import cache_folder

TOKENS = [[3, 7, 11, 5, 9, 4], [8, 6, 10, 12]]
NAMES = ("tiny:add-moe", "tiny:add-deepseek")


@torch.inference_mode()
def own_choice(checkpoint):
    """Routes that transformers chooses by itself, and [tokens, hidden] input of each block, by sequence and layer."""
    model = load_model(checkpoint, torch.float32)
    routes, inputs = [], []
    for tokens in TOKENS:
        chosen, hidden = {}, {}
        hooks = [
            hook
            for layer, block in mixtures_of(model).items()
            for hook in (
                block.experts.register_forward_pre_hook(lambda _, args, at=layer, to=chosen: to.update({at: args[1]})),
                block.register_forward_pre_hook(lambda _, args, at=layer, to=hidden: to.update({at: args[0][0]})),
            )
        ]
        model(input_ids=torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        routes.append([[at, layer, *row] for layer, rows in chosen.items() for at, row in enumerate(rows.tolist())])
        inputs.append(hidden)
    return model, routes, inputs


@pytest.mark.parametrize("name", NAMES)
def test_own_choice_is_the_best(name):
    checkpoint = resolve_model(name, cache_folder(), "float32")
    model, routes, _ = own_choice(checkpoint)
    found = choice_gaps(None, checkpoint, TOKENS, routes, "float32")
    assert [row["layer"] for row in found] == list(mixtures_of(model))
    assert {(row["num_tokens"], row["shortfall"], row["noise"]) for row in found} == {(10, 0.0, 0.0)}
    assert {(row["closed"], row["closed_in_dtype"]) for row in found} == {(0, 0)}
    assert all(0.0 < row["noise"] < 0.5 for row in choice_gaps(None, checkpoint, TOKENS, routes, "bfloat16"))


def test_the_worst_expert_is_told_by_its_score():
    checkpoint = resolve_model("tiny:add-moe", cache_folder(), "float32")
    model, routes, inputs = own_choice(checkpoint)
    layer = max(mixtures_of(model))
    weight = mixtures_of(model)[layer].gate.weight.double()
    scores = np.array(torch.softmax(inputs[1][layer][2].double() @ weight.T, dim=-1))
    ranked = np.argsort(scores)
    (row,) = [row for row in routes[1] if row[:2] == [2, layer]]
    assert sorted(row[2:]) == sorted(ranked[2 - len(row) :])
    row[-1] = int(ranked[0])
    *others, found = choice_gaps(None, checkpoint, TOKENS, routes, "float32")
    assert {other["shortfall"] for other in others} == {0.0}
    best = scores[ranked[2 - len(row)]]
    assert found["shortfall"] == pytest.approx((best - scores.min()) / (scores.max() - scores.min()), rel=1e-4)
    assert (found["place"], found["closed"], found["num_tokens"]) == ([1, 2], 0, 10)


def test_an_expert_of_a_closed_group_is_counted():
    checkpoint = resolve_model("tiny:add-deepseek", cache_folder(), "float32")
    model, routes, _ = own_choice(checkpoint)
    layer, config = max(mixtures_of(model)), model.config
    per_group = config.n_routed_experts // config.n_group
    (row,) = [row for row in routes[0] if row[:2] == [4, layer]]
    open_groups = {expert // per_group for expert in row[2:]}
    assert len(open_groups) == config.topk_group  # so every other group is closed
    row[-1] = next(e for e in range(config.n_routed_experts) if e // per_group not in open_groups)
    found = choice_gaps(None, checkpoint, TOKENS, routes, "float32")[-1]
    assert (found["closed"], found["closed_in_dtype"], found["place"]) == (1, 0, [0, 4])


def test_tokens_without_a_route_are_left_out():
    checkpoint = resolve_model("tiny:add-moe", cache_folder(), "float32")
    _, routes, _ = own_choice(checkpoint)
    kept = [[row for row in rows if row[0] < 3] for rows in routes]
    assert {row["num_tokens"] for row in choice_gaps(None, checkpoint, TOKENS, kept, "float32")} == {6}
