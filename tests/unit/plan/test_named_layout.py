"""Plans without a hand-written row: places by names give the ranks what a row gives them; stacks; what is not planned.

What this does not exercise: published sizes (tests/dist/test_published_configs.py); ranks, which no plan of these has.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.scaled_configs import published
from verifier.cli.plan import as_text
from verifier.config import PlanConfig
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.architectures_hf import architectures, scaled_config
from verifier.model.families import Content, TensorSpec
from verifier.model.tiny import tiny_config
from verifier.plan import run_plan as plans
from verifier.plan.held_shards import holdings_of, join_bytes
from verifier.plan.named_layout import ASSUMED, NamedLayout
from verifier.plan.run_plan import run_plan

DENSE = (Mesh(tp=4), Mesh(tp=2, pp=2, dp=2))
MIXTURES = (Mesh(tp=2, pp=2, ep=2, dp=2), Mesh(tp=2, ep=2, etp=2, dp=2))
FAMILIES = {
    "qwen3": DENSE, "qwen3-tied": DENSE, "qwen2": DENSE, "llama": DENSE, "qwen3-moe": MIXTURES,
    "deepseek-v3": MIXTURES, "nemotron-h": MIXTURES,
}  # fmt: skip
CASES = [(name, mesh) for name, meshes in FAMILIES.items() for mesh in meshes]
MOST_APART = 0.12
"""Estimates of activations; latent attention keeps its keys twice, which names do not tell."""


def plan_of(config, mesh, dtype="bfloat16"):
    return run_plan(PlanConfig(model="any", dtype=dtype, mesh=mesh), config)


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=[f"{name}-{mesh.label()}" for name, mesh in CASES])
def test_ranks_hold_as_much_by_names_as_by_the_row(name, mesh, monkeypatch):
    config = tiny_config(name, "bfloat16")
    by_row = plan_of(config, mesh)
    monkeypatch.setattr(plans, "layout_of", lambda sizes: None)
    by_names = plan_of(config, mesh)
    assert by_names.contradictions == by_row.contradictions == ()
    assert (by_names.shapes, by_names.num_bytes) == (by_row.shapes, by_row.num_bytes)
    assert by_names.num_parameters == by_row.num_parameters
    for one, row, own, other in zip(
        by_names.made.holdings, by_row.made.holdings, by_names.made.memory, by_row.made.memory, strict=True
    ):
        assert one.ranks == row.ranks
        assert [one.count(expert=kind) for kind in (False, True)] == [row.count(expert=kind) for kind in (False, True)]
        assert own.certain == other.certain
        assert own.activations == pytest.approx(other.activations, rel=MOST_APART)
    copies = [Counter(item.copies for item in plan.made.ownership.replicas.values()) for plan in (by_names, by_row)]
    assert copies[0] == copies[1]


@pytest.mark.parametrize("kind", architectures())
def test_every_architecture_of_transformers_and_the_bridge_has_a_sound_plan(kind):
    groups = {"mamba_n_groups": 2} if kind == "falcon_h1" else {}  # its one group is on no two ranks
    plan = plan_of(scaled_config(kind, "bfloat16") | groups, Mesh(tp=2, pp=2))
    assert plan.contradictions == ()
    assert plan.num_parameters <= sum(math.prod(shape) for shape in plan.shapes.values())


def stacked(width=48):
    """Two layers with a stack of four experts each, inputs before outputs."""
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        shapes |= {
            f"{experts}gate_up_proj": (4, 32, 2 * width), f"{experts}gate_up_proj_bias": (4, 2 * width),
            f"{experts}down_proj": (4, width, 32), f"{experts}down_proj_bias": (4, 32),
            f"model.layers.{layer}.mlp.router.weight": (4, 32), f"model.layers.{layer}.odd_proj.weight": (96, 32),
        }  # fmt: skip
    return NamedLayout(tuple(TensorSpec(name=name, shape=of, content=Content.MATRIX) for name, of in shapes.items()))


def test_a_stack_of_experts_is_divided_over_ep_and_etp():
    holdings = holdings_of(stacked(), Mesh(tp=2, pp=2, ep=2, etp=2, dp=2))
    expert = 32 * 2 * 48 // 2 + 2 * 48 // 2 + 48 * 32 // 2 + 32
    assert {item.count(expert=True) for item in holdings} == {2 * expert}
    stack = 4 * 32 * 2 * 48
    assert join_bytes(holdings, Mesh(ep=2, dp=2), 2) == 2 * 2 * stack  # joined once, however many experts a rank has


def test_a_tensor_of_an_unknown_kind_is_whole_on_every_rank_of_its_stage():
    first, last = (
        next(item for item in holdings_of(stacked(), Mesh(tp=2, pp=2)) if item.at.pp == stage) for stage in range(2)
    )
    whole = 4 * 32 + 96 * 32
    assert first.count(expert=False) == 64 * 32 // 2 + whole
    assert last.count(expert=False) == 64 * 32 // 2 + 32 + whole


def test_a_size_that_does_not_divide_is_a_contradiction():
    plan = plan_of(scaled_config("gpt_oss", "bfloat16"), Mesh(ep=3, dp=3))
    assert plan.contradictions == ("ep = 3 does not divide the 16 experts of GptOssForCausalLM",)
    with pytest.raises(UsageError, match=r"etp = 5 does not divide dim 2 of `model\.layers\.0\.mlp\.experts\.gate_up"):
        holdings_of(stacked(), Mesh(etp=5, dp=5))


def test_the_plan_says_in_one_line_that_places_are_derived_and_what_it_assumes():
    config = published("gpt-oss-20b")
    (line,) = (row for row in as_text(plan_of(config, Mesh(ep=8, dp=8))).splitlines() if row.startswith("placed"))
    by = "by names and shapes of transformers' GptOssForCausalLM, without a hand-written row"
    assert line == f"placed      {by}; assumed: {ASSUMED}"
    without = plan_of(published("Mixtral-8x7B-v0.1"), Mesh()).derived
    assert without.endswith("; megatron-bridge has no bridge for MixtralForCausalLM, so no run starts")
    assert plan_of(tiny_config("qwen3", "bfloat16"), Mesh()).derived == ""


def test_a_model_of_several_modalities_is_planned_as_its_language_model():
    plan = plan_of(published("Qwen3.5-27B"), Mesh(tp=4))
    assert plan.num_parameters == 26_895_998_464
    assert plan.left_out == (
        "layers that predict further tokens (MTP), of which config.json names 1",
        "the part of the model that reads images",
    )


OTHERWISE_SPELLED = {
    "qwen3-vl-30b-a3b-instruct": (Mesh(tp=4, ep=8, dp=2), 30_532_122_624),  # no class of the text alone; untied outside
    "qwen3-vl-8b-instruct": (Mesh(tp=4, pp=2), 8_190_735_360),  # the class of its text has no `tie_word_embeddings`
    "gemma-3n-e4b-it": (Mesh(tp=2, dp=4), 6_835_235_568),  # a width for each layer
    "phi-3.5-moe-instruct": (Mesh(tp=8, pp=2, ep=8), 41_873_153_344),  # PhiMoEForCausalLM, Phimoe in transformers
    "ernie-4.5-21b-a3b-pt": (Mesh(tp=4, ep=8, dp=2), 21_825_436_160),  # moe_num_experts, moe_k
    "pythia-1.4b": (Mesh(tp=4, pp=2), 1_414_647_808),  # embed_in, embed_out, query_key_value, dense_h_to_4h
}


@pytest.mark.parametrize("name", OTHERWISE_SPELLED)
def test_a_published_config_of_another_spelling_has_the_parameters_of_a_model_without_weights(name):
    mesh, parameters = OTHERWISE_SPELLED[name]
    config = json.loads((Path(__file__).parent / "published" / name / "config.json").read_text())
    plan = plan_of(config, mesh)
    assert (plan.contradictions, plan.num_parameters) == ((), parameters)
    assert plan.specs[0].shape == (plan.sizes["vocab_size"], plan.sizes["hidden_size"])


REFUSED = {
    "code of the folder": (
        {"architectures": ["KimiForCausalLM"], "model_type": "kimi_k9", "auto_map": {"AutoConfig": "kimi.Config"}},
        r"no hand-written row describes KimiForCausalLM, and config\.json has `model_type` = 'kimi_k9', which "
        r"transformers \S+ has no class for; `auto_map` names code of the folder's own, which verifier does not run$",
    ),
    "no causal language model": (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
        "transformers builds no T5ForConditionalGeneration of config.json: ValueError: Unrecognized configuration",
    ),
    "another model": (
        {"architectures": ["GemmaForSequenceClassification"], "model_type": "gemma"},
        "config.json names GemmaForSequenceClassification, and transformers builds a GemmaForCausalLM of it$",
    ),
    "a size that transformers refuses": (
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_size": "wide"},
        "transformers builds no GemmaForCausalLM of config.json: Strict.*'hidden_size': TypeError: Field .*wide",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_does_not_build_is_refused_in_one_sentence(case):
    config, sentence = REFUSED[case]
    with pytest.raises(UsageError, match=sentence) as refusal:
        plan_of(config, Mesh())
    assert "\n" not in str(refusal.value)


def test_embedding_and_head_of_gpt_neox_are_divided_over_tp_and_stand_at_either_end():
    config = json.loads((Path(__file__).parent / "published" / "pythia-1.4b" / "config.json").read_text())
    holdings = plan_of(config, Mesh(tp=4, pp=2)).made.holdings
    hidden, norms_and_biases = 2048, 2048 * (4 + 2) + (3 * 2048 + 8192) // 4
    layer = 12 * hidden**2 // 4 + norms_and_biases
    first, last = (next(item for item in holdings if item.at.pp == stage) for stage in range(2))
    assert first.count(expert=False) == 12 * layer + 50304 * hidden // 4
    assert last.count(expert=False) == 12 * layer + 50304 * hidden // 4 + 2 * hidden
