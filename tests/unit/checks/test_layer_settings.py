"""LGP007 and ENG007 on windows of single layers, bounds and dtypes that a short run hardly computes with."""

import json
import math

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.stages.engine.records import SyncedSettings
from verifier.stages.load.records import StatedConfig
from verifier.stages.logprob.records import LAYER_WINDOWS, NORM_EPSILONS, ROTARY_FREQUENCIES, ProviderFields

KINDS = ["sliding_attention", "full_attention"]
MIXED = {
    "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "layer_types": KINDS, "sliding_window": 1024,
    "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
}  # fmt: skip
OF_MIXED = {
    "hidden_size": 8, "num_attention_heads": 2, "num_layers": 2, "kv_channels": 4, "window_size": [1023, 0],
    "seq_length": 8192, "final_logit_softcapping": 30.0, LAYER_WINDOWS: {"0": 1023, "1": None},
    "params_dtype": "torch.bfloat16", "num_moe_experts": None, "position_embedding_type": "rope",
}  # fmt: skip
EXPERTS = {"model_type": "deepseek_v3", "n_routed_experts": 8}
OF_EXPERTS = {"num_moe_experts": 8, "moe_router_dtype": "fp32"}
GPT_OSS = {"model_type": "gpt_oss"}
EPSILON, OF_EPSILON = {"rms_norm_eps": 1e-6}, {"layernorm_epsilon": 1e-6}
PLAIN_ROPE, OF_PLAIN_ROPE = {"rope_theta": 1e4, "head_dim": 4}, {"rotary_base": 10000}
YARN = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
OF_YARN = {"position_embedding_type": "yarn", "rotary_base": 10000, "yarn_rotary_scaling_factor": 4.0}
ROUNDED = {"yarn_correction_range_round_to_int": True}
GEMMA = {"model_type": "gemma", "hidden_act": "gelu"}
NORM = "decoder.layers.*.self_attention.q_layernorm"


def stretched(**numbers):
    return YARN | {"rope_scaling": YARN["rope_scaling"] | numbers}


def texts(values):
    return {key: json.dumps(value) for key, value in values.items()}


def in_trainer(config, fields):
    records = [
        StatedConfig(name="config.json", values=texts(MIXED | config)),
        ProviderFields(name="provider", values=texts(OF_MIXED | fields)),
    ]
    outcome = run_check(REGISTRY["LGP007"], make_trace(records))
    assert outcome.error is None
    return outcome.finding and outcome.finding.first.what


@pytest.mark.parametrize(
    ("config", "fields", "what"),
    [
        ({}, {}, None),
        ({}, {LAYER_WINDOWS: {"0": None, "1": 1023}}, "window of layer 0"),
        ({}, {LAYER_WINDOWS: {"1": 1023}}, "window of layer 1"),
        ({}, {LAYER_WINDOWS: {"0": 1024}}, "window of layer 0"),
        ({"layer_types": ["sliding_attention", "linear_attention"]}, {LAYER_WINDOWS: {"0": None}}, None),
        ({"sliding_window": 8192}, {"window_size": [8191, 0], LAYER_WINDOWS: {"0": 8191}}, None),  # Ministral 8B
        ({"sliding_window": 8192}, {"window_size": None, LAYER_WINDOWS: {"0": None}}, None),
        ({"sliding_window": 8192}, {}, "config.json sliding_window"),
        ({}, {"final_logit_softcapping": None}, "config.json final_logit_softcapping"),
        ({"final_logit_softcapping": None}, {}, "config.json final_logit_softcapping"),
        ({"final_logit_softcapping": None}, {"final_logit_softcapping": None}, None),
        (EXPERTS, OF_EXPERTS, None),
        (EXPERTS, OF_EXPERTS | {"moe_router_dtype": "fp64"}, None),
        (EXPERTS, OF_EXPERTS | {"moe_router_dtype": None}, "config.json moe_router_dtype"),
        (EXPERTS, OF_EXPERTS | {"moe_router_dtype": None, "params_dtype": "torch.float32"}, None),
        (GPT_OSS, {"activation_func_clamp_value": 7.0}, None),
        (GPT_OSS, {}, "config.json swiglu_limit"),
        ({"swiglu_limit": 10.0}, {"activation_func_clamp_value": 7.0}, "config.json swiglu_limit"),
        ({}, {"activation_func_clamp_value": 7.0}, "config.json swiglu_limit"),
        (EPSILON, OF_EPSILON | {NORM_EPSILONS: {NORM: [1e-6]}}, None),
        (EPSILON, OF_EPSILON | {NORM_EPSILONS: {NORM: [1e-5]}}, f"epsilon of {NORM}"),
        (EPSILON, OF_EPSILON | {NORM_EPSILONS: {NORM: [1e-6, 1e-5]}}, f"epsilon of {NORM}"),
        ({}, {NORM_EPSILONS: {NORM: [1e-5]}}, None),
        (PLAIN_ROPE, OF_PLAIN_ROPE | {ROTARY_FREQUENCIES: {"rotary_pos_emb": [1.0, 0.01]}}, None),
        *(
            (PLAIN_ROPE, OF_PLAIN_ROPE | {ROTARY_FREQUENCIES: {"rotary_pos_emb": off}}, "frequencies of rotary_pos_emb")
            for off in ([1.0, 0.010009765625], [0.0, 0.0], [1.0], [], [math.nan, 0.01])
        ),
        ({}, {ROTARY_FREQUENCIES: {"rotary_pos_emb": [1.0, 0.5]}}, None),
        (YARN, OF_YARN | ROUNDED, None),
        (YARN, OF_YARN, "config.json rope_scaling.truncate"),
        (stretched(truncate=False), OF_YARN, None),
        (stretched(truncate=False), OF_YARN | ROUNDED, "config.json rope_scaling.truncate"),
        (stretched(attention_factor=1.138629436111989), OF_YARN | ROUNDED, None),
        (stretched(attention_factor=0.9), OF_YARN | ROUNDED, "config.json rope_scaling.attention_factor"),
        (GEMMA, {"activation_func": "fast_gelu"}, None),
        (GEMMA, {"activation_func": "gelu"}, "config.json hidden_act"),
        (GEMMA | {"hidden_activation": "gelu"}, {"activation_func": "gelu"}, None),
    ],
)
def test_a_trainers_setting_is_that_of_config_json(config, fields, what):
    assert in_trainer(config, fields) == what


ATTENTION = "model.layers.{}.self_attn.attn"


@pytest.mark.parametrize(
    ("name", "values", "what"),
    [
        (ATTENTION.format(0), {"impl.sliding_window": "[1023, 0]"}, None),
        (ATTENTION.format(1), {"impl.sliding_window": "[-1, -1]"}, None),
        (
            ATTENTION.format(1),
            {"impl.sliding_window": "[1023, 0]"},
            f"{ATTENTION.format(1)}.impl.sliding_window",
        ),
        (ATTENTION.format(0), {"impl.sliding_window": "[-1, -1]"}, f"{ATTENTION.format(0)}.impl.sliding_window"),
        ("logits_processor", {"soft_cap": "30.0"}, None),
        ("logits_processor", {"scale": "1.0"}, "logits_processor.soft_cap"),
        ("model.norm", {"variance_epsilon": "1e-06"}, None),
    ],
)
def test_an_engines_setting_is_that_of_config_json(name, values, what):
    records = [
        StatedConfig(name="config.json", values=texts(MIXED)),
        SyncedSettings(name=name, version=1, values=values),
    ]
    outcome = run_check(REGISTRY["ENG007"], make_trace(records))
    assert outcome.error is None
    assert (outcome.finding and outcome.finding.first.what) == what
    assert (outcome.verdict is Verdict.VIOLATED) == (what is not None)


@pytest.mark.parametrize(
    ("kind", "rows", "right"), [("default", 32768, True), ("default", 8192, False), ("yarn", 1, True)]
)
def test_a_rope_of_images_has_angles_of_four_times_as_many_positions(kind, rows, right):
    rope = {"rope_type": kind, "factor": 2.0, "mrope_section": [2, 1, 1]}
    config = {"rope_parameters": rope, "max_position_embeddings": 8192}
    records = [
        StatedConfig(name="config.json", values=texts(MIXED | config)),
        SyncedSettings(name="layers.3.self_attn.rotary_emb", version=1, values={"max_position_embeddings": str(rows)}),
    ]
    outcome = run_check(REGISTRY["ENG007"], make_trace(records))
    assert outcome.error is None
    assert (outcome.finding is None) == right


@pytest.mark.parametrize(
    ("own", "of_sum", "right"),
    [("1.0", "2.5", True), ("2.5", "1.0", True), ("2.5", "2.5", False), ("1.0", "1.0", False)],
)
def test_a_factor_of_experts_is_applied_once(own, of_sum, right):
    records = [
        StatedConfig(name="config.json", values=texts(MIXED | EXPERTS | {"routed_scaling_factor": 2.5})),
        SyncedSettings(name="mlp.experts", version=1, values={"routed_scaling_factor": own}),
        SyncedSettings(name="mlp.experts.runner", version=1, values={"routed_scaling_factor": of_sum}),
    ]
    outcome = run_check(REGISTRY["ENG007"], make_trace(records))
    assert outcome.error is None
    assert (outcome.finding and outcome.finding.first.what) == (
        None if right else "mlp.experts.routed_scaling_factor"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ahead", "pattern"),
    [
        ({"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}, "M*/*E/*E"),
        ({"num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": "*E"}, "M*"),
        ({}, "M*"),
    ],
)
def test_a_hybrid_trainer_has_the_layers_of_steps_ahead_behind_slashes(ahead, pattern):
    config, fields = {"hybrid_override_pattern": "M*"} | ahead, {"position_embedding_type": "none"}
    assert in_trainer(config, fields | {"hybrid_layer_pattern": pattern}) is None
    assert "hybrid_override_pattern" in in_trainer(config, fields | {"hybrid_layer_pattern": pattern + "/ME"})
