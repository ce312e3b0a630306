"""Operations of training, counted by hand for models of a few numbers."""

from dataclasses import replace

import pytest

from verifier.config.lora import LoraOptions
from verifier.config.training import TrainConfig
from verifier.trainer.metrics import TrainingFlops, training_flops, utilisation_of

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 8,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
}  # fmt: skip
MATRICES = 100 * 8 + 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
MIXTURE = LLAMA | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 5, "head_dim": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
H100 = "NVIDIA H100 80GB HBM3"


def test_a_dense_model_is_counted_by_hand():
    assert training_flops(LLAMA) == TrainingFlops(matrices=MATRICES, pair=2 * 3 * 16, passes=3)


def test_a_token_visits_some_experts_alone():
    found = training_flops(MIXTURE)
    assert found is not None
    assert found.matrices == 100 * 8 + 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 6 * 8 + 2 * 3 * 8 * 5)


def test_a_step_is_six_n_t_and_causal_attention():
    """For one long sequence, the attention term tends to half of PaLM's 12 L H Q T for each token."""
    flops, length = TrainingFlops(matrices=MATRICES, pair=2 * 3 * 16), 10_000
    assert flops.of([2, 1]) == 6 * MATRICES * 3 + 3 * 2 * 3 * 16 * (3 + 1)
    attention = flops.of([length]) - 6 * MATRICES * length
    assert attention / length == pytest.approx(12 * 3 * 8 * length / 2, rel=1e-3)


def test_frozen_weights_have_no_gradient():
    found = training_flops(LLAMA, frozen=True)
    assert found == TrainingFlops(matrices=MATRICES, pair=2 * 3 * 16, passes=2)


def test_utilisation_needs_known_gpus_and_bf16(tmp_path):
    config = TrainConfig(model="m", run=tmp_path, dtype="bfloat16")
    found = utilisation_of(config, LLAMA, [H100, "another GPU, of the engine"])
    assert found is not None
    assert found.facts([2, 1], 0.5) == {"mfu": found.flops.of([2, 1]) / 0.5 / 989e12}
    assert found.facts([], 0.5) == {}
    assert utilisation_of(config, LLAMA, []) is None
    assert utilisation_of(config, LLAMA, ["NVIDIA H100 PCIe"]) is None
    assert utilisation_of(config, {"model_type": "unheard"}, [H100]) is None
    assert utilisation_of(replace(config, dtype="float32"), LLAMA, [H100]) is None
    adapted = utilisation_of(replace(config, lora=LoraOptions(rank=4)), LLAMA, [H100])
    assert adapted is not None
    assert adapted.flops.passes == 2
