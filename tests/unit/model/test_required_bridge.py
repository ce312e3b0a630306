"""Models that megatron-bridge has no bridge for, or finds none for."""

import pytest

from verifier.errors import UsageError
from verifier.model.bridges import require_bridge


def config_of(architecture, own=None):
    return {"architectures": [architecture], **({"auto_map": {"AutoModelForCausalLM": own}} if own else {})}


@pytest.mark.parametrize(
    "config",
    [
        config_of("LlamaForCausalLM"),
        {**config_of("LlamaForCausalLM"), "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}},
        config_of("DeepseekV3ForCausalLM", "modeling_deepseek.DeepseekV3ForCausalLM"),
        config_of("NemotronHForCausalLM", "modeling_nemotron_h.NemotronHForCausalLM"),
    ],
)
def test_a_bridge_is_found(config):
    require_bridge(config, "model")


def test_an_architecture_without_a_bridge_is_refused():
    with pytest.raises(
        UsageError, match="unknown family: megatron-bridge has no bridge for GptForCausalLM, which m holds"
    ):
        require_bridge(config_of("GptForCausalLM"), "m")


def test_code_of_the_models_own_by_whose_class_no_bridge_is_found_is_named():
    with pytest.raises(UsageError) as refusal:
        require_bridge(config_of("LlamaForCausalLM", "modeling_llama_together_yarn.LlamaForCausalLM"), "Yarn-Llama-2")
    assert str(refusal.value) == (
        "Yarn-Llama-2 has `auto_map` in config.json, by whose LlamaForCausalLM megatron-bridge looks for a bridge and "
        "finds none: remove the key, and it takes the one for transformers' LlamaForCausalLM"
    )
