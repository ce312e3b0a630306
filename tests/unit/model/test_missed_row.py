"""Which condition of a hand-written row a config misses."""

import pytest
from transformers import AutoConfig

from verifier.model.families import missed_row
from verifier.model.tiny import KNOWN, tiny_config

COST = (
    "; without it there are no adapters, `verifier train` does not judge what its ranks load, and a load that errs "
    "alike on all ranks is seen in log-probabilities alone (LGP001)"
)


def config_of(model_type, architecture, **keys):
    return {**AutoConfig.for_model(model_type, **keys).to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            config_of("llama", "LlamaForCausalLM", attention_bias=True),
            "the hand-written row llama does not hold for this model: config.json has `attention_bias` = true, where "
            "it needs false or none",
        ),
        (
            config_of("deepseek_v3", "DeepseekV3ForCausalLM", q_lora_rank=None),
            "the hand-written row deepseek-v3 does not hold for this model: config.json has no `q_lora_rank`, which it "
            "needs",
        ),
        (
            {
                **config_of("qwen3", "Qwen3ForCausalLM"),
                "head_dim": None,
            },  # 128 in transformers, whatever the hidden size
            "the hand-written row qwen3 does not hold for this model: config.json has no `head_dim`, which it needs",
        ),
        (
            {
                **config_of("llama", "LlamaForCausalLM", mlp_bias=True),
                "architectures": ["LlamaForCausalLM", "LlamaModel"],
            },
            "the hand-written row llama does not hold for this model: config.json has `mlp_bias` = true, where it "
            "needs false or none",
        ),
        (
            config_of("qwen3", "Qwen3ForSequenceClassification"),
            "the hand-written row qwen3 does not hold for this model: config.json has `architectures` = "
            '["Qwen3ForSequenceClassification"], where it needs [Qwen3ForCausalLM]',
        ),
    ],
)
def test_the_first_condition_is_named_and_what_it_costs(config, text):
    assert missed_row(config) == text + COST


def test_a_row_that_holds_misses_nothing():
    assert {missed_row(tiny_config(name, "float32")) for name in KNOWN} == {""}


def test_a_type_without_a_row_misses_nothing():
    assert missed_row(config_of("olmoe", "OlmoeForCausalLM")) == ""
