from __future__ import annotations

import subprocess
import sys

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import nn

from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.mesh_fit import validate
from verifier.model.provider_megatron import DataParallel, _require_packs
from verifier.model.tiny import TINY


def config_of(name, **changes):
    architecture = {
        "qwen3": "Qwen3ForCausalLM",
        "qwen3-moe": "Qwen3MoeForCausalLM",
        "deepseek-v3": "DeepseekV3ForCausalLM",
        "nemotron-h": "NemotronHForCausalLM",
    }
    return {"architectures": [architecture[name]], **TINY[name][1], **changes}


@pytest.mark.parametrize(
    ("config", "mesh", "sentence"),
    [
        (config_of("qwen3"), {"ep": 2, "dp": 2}, "ep = 2, but Qwen3ForCausalLM has no experts"),
        (config_of("qwen3"), {"etp": 2, "tp": 2}, "etp = 2, but Qwen3ForCausalLM has no experts"),
        (config_of("qwen3"), {"tp": 3}, "tp = 3 does not divide the 8 attention heads of Qwen3ForCausalLM"),
        (
            config_of("qwen3", num_attention_heads=12),
            {"tp": 6},
            "tp = 6 does not divide the 4 key-value heads of Qwen3ForCausalLM",
        ),
        (
            config_of("qwen3", vocab_size=511),
            {"tp": 2},
            "tp = 2 does not divide the 511 vocabulary entries of Qwen3ForCausalLM",
        ),
        (
            config_of("qwen3", intermediate_size=129),
            {"tp": 2},
            "tp = 2 does not divide the 129 columns of the feed-forward layers of Qwen3ForCausalLM",
        ),
        (config_of("qwen3-moe"), {"ep": 3, "dp": 3}, "ep = 3 does not divide the 16 experts of Qwen3MoeForCausalLM"),
        (
            config_of("deepseek-v3"),
            {"etp": 3, "dp": 3},
            "etp = 3 does not divide the 64 columns of an expert of DeepseekV3ForCausalLM",
        ),
        (
            config_of("nemotron-h", n_groups=3),
            {"tp": 2},
            "tp = 2 does not divide the 3 groups of the state-space layers of NemotronHForCausalLM",
        ),
        (
            {"architectures": ["FalconH1ForCausalLM"], "mamba_n_groups": 1},
            {"tp": 2},
            "tp = 2 does not divide the 1 groups of the state-space layers of FalconH1ForCausalLM",
        ),
        (
            config_of("nemotron-h"),
            {"tp": 4, "cp": 8},
            "tp * cp = 4 * 8 does not divide the 16 heads of the state-space layers of NemotronHForCausalLM",
        ),
        (
            config_of("nemotron-h", mamba_num_heads=24, n_groups=4),
            {"cp": 3},
            "cp = 3 does not divide the 4 groups that a tensor-parallel rank holds of the state-space layers of "
            "NemotronHForCausalLM",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 4},
            {"tp": 2, "cp": 4},
            "tp * cp = 2 * 4 does not divide the 4 key heads of the gated delta nets of Qwen3NextForCausalLM",
        ),
        (
            config_of("nemotron-h"),
            {"pp": 2, "vpp": 2},
            "vpp = 2, but megatron-bridge builds NemotronHForCausalLM without virtual stages",
        ),
        (
            config_of("qwen3"),
            {"pp": 3},
            "4 layers do not divide over pp * vpp = 3 * 1 chunks: give --first-stage-layers or --last-stage-layers, "
            "or other sizes",
        ),
    ],
)
def test_refuses_a_mesh_that_does_not_divide_the_model(config, mesh, sentence):
    with pytest.raises(UsageError) as refusal:
        validate(config, Mesh(**mesh))
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("mesh", [{}, {"tp": 4, "ep": 4}, {"pp": 4}, {"pp": 3, "first_stage_layers": 2}])
def test_accepts_a_mesh_that_does(mesh):
    validate(config_of("qwen3-moe"), Mesh(**mesh))


def test_latent_attention_has_no_key_value_heads_to_divide():
    validate(config_of("deepseek-v3", num_key_value_heads=1), Mesh(tp=4))


def test_gathering_in_overlap_needs_sharded_parameters():
    with pytest.raises(UsageError, match=r"^overlap_param_gather needs distributed_optimizer and overlap_grad_reduce$"):
        DataParallel(overlap_param_gather=True)


def test_validation_loads_nothing_heavy():
    code = "import sys, verifier.model.provider_megatron; print({'torch', 'megatron.core'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "set()"


class Chunk(nn.Module):
    def forward(self, tokens, packed_seq_params=None):
        return tokens


class WithoutPacks(nn.Module):
    def forward(self, tokens):
        return tokens


def with_plain_attention(name):
    chunk, attention = Chunk(), DotProductAttention.__new__(DotProductAttention)
    nn.Module.__init__(attention)
    chunk.add_module(name, attention)
    return chunk


@pytest.mark.parametrize(
    ("chunk", "lacks"),
    [
        (WithoutPacks(), "WithoutPacks"),
        (with_plain_attention("decoder"), "DotProductAttention"),
    ],
)
def test_a_model_that_takes_no_packed_sequences_is_refused_before_a_step(chunk, lacks):
    with pytest.raises(UsageError, match=rf"^OddForCausalLM takes no packed sequences.* with {lacks}$"):
        _require_packs("OddForCausalLM", [Chunk(), chunk])


def test_the_attention_of_transformer_engine_takes_packs_whatever_its_base_is_called():
    base = type("DotProductAttention", (nn.Module,), {"__module__": "transformer_engine.pytorch.attention"})
    chunk = Chunk()
    chunk.add_module("decoder", type("TEDotProductAttention", (base,), {"__module__": "megatron.core.extensions"})())
    assert _require_packs("OddForCausalLM", [chunk]) == [chunk]


def test_what_reads_images_may_attend_without_packs():
    chunks = [with_plain_attention("vision_model")]
    assert _require_packs("OddForCausalLM", chunks) == chunks
