"""Bugs of the load: checkpoint tensors and config to live Megatron parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Fault, Fired
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
INIT_STD = 0.02


def _initial(like: Any) -> Any:
    import torch

    return torch.empty_like(like).normal_(std=INIT_STD, generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def _expert_left_at_init(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def load(self: Any, hf_param: Any, hf_state_dict: Any) -> Any:
            weights = original(self, hf_param, hf_state_dict)
            if hf_param == "model.layers.1.mlp.experts.3.down_proj.weight":
                fired()
                weights = _initial(weights)
            return weights

        return load

    with replaced(f"{BRIDGE}.maybe_modify_loaded_hf_weight", "self, hf_param, hf_state_dict", make):
        yield


@contextlib.contextmanager
def _score_bias_zeroed(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def load(self: Any, hf_pretrained: Any, megatron_model: Any, **options: Any) -> Any:
            loaded = original(self, hf_pretrained, megatron_model, **options)
            for chunk in loaded:
                for name, buffer in chunk.named_buffers():
                    if name.endswith(".expert_bias"):
                        fired()
                        buffer.zero_()
            return loaded

        return load

    with replaced(
        f"{BRIDGE}.load_weights_hf_to_megatron",
        "self, hf_pretrained, megatron_model, allowed_mismatched_params",
        make,
    ):
        yield


@contextlib.contextmanager
def _qkv_head_major(fired: Fired) -> Iterator[None]:
    import torch

    def merge(original: Any) -> Any:
        def merge_qkv_weights(provider: Any, q: Any, k: Any, v: Any) -> Any:
            fired()
            return torch.cat([q, k, v])

        return merge_qkv_weights

    def split(original: Any) -> Any:
        def split_qkv_weights(provider: Any, qkv: Any, feature_dim: Any = None) -> Any:
            size = provider.kv_channels
            rows = [provider.num_attention_heads * size, *[provider.num_query_groups * size] * 2]
            return torch.split(qkv, rows)

        return split_qkv_weights

    mapping = f"{CONVERSION}.param_mapping"
    with (
        replaced(f"{mapping}:merge_qkv_weights", "provider, q, k, v", merge),
        replaced(f"{mapping}:split_qkv_weights", "provider, qkv, feature_dim", split),
    ):
        yield


@contextlib.contextmanager
def _qkv_biases_head_major(fired: Fired) -> Iterator[None]:
    import torch

    def merge(original: Any) -> Any:
        def merge_qkv_biases(config: Any, q: Any, k: Any, v: Any) -> Any:
            fired()
            return torch.cat([q, k, v])

        return merge_qkv_biases

    def split(original: Any) -> Any:
        def split_qkv_biases(config: Any, qkv: Any) -> Any:
            groups = config.num_query_groups * config.kv_channels
            return torch.split(qkv, [len(qkv) - 2 * groups, groups, groups])

        return split_qkv_biases

    mapping = f"{CONVERSION}.param_mapping"
    with (
        replaced(f"{mapping}:merge_qkv_biases", "config, q, k, v", merge),
        replaced(f"{mapping}:split_qkv_biases", "config, qkv", split),
    ):
        yield


@contextlib.contextmanager
def _tied_head_left_at_init(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def broadcast(self: Any, megatron_model: Any) -> None:
            for chunk in megatron_model:
                for name, parameter in chunk.named_parameters():
                    if name.endswith("output_layer.weight"):
                        fired()
                        parameter.data.copy_(_initial(parameter.data))

        return broadcast

    with replaced(f"{BRIDGE}._broadcast_shared_embeddings", "self, megatron_model", make):
        yield


@contextlib.contextmanager
def _stage_names_remapped(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def to_global(models: Any, config: Any, param_name: str, vp_stage: Any = None) -> str:
            name: str = original(models, config, param_name, vp_stage)
            for here, there in (("layers.2.", "layers.3."), ("layers.3.", "layers.2.")):
                if here in name and name.endswith("q_layernorm.weight"):
                    fired()
                    return name.replace(here, there)
            return name

        return to_global

    with replaced(
        f"{CONVERSION}.model_bridge:_megatron_local_name_to_global", "models, config, param_name, vp_stage", make
    ):
        yield


@contextlib.contextmanager
def _decay_rounded(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def keep(chunks: Any, stored: Any) -> Any:
            fired()
            return chunks

        return keep

    with replaced("verifier.platform.upstream_fixes_megatron:keep_float32", "chunks, stored", make):
        yield


@contextlib.contextmanager
def _rope_scaling_default(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def provide(self: Any, hf_pretrained: Any) -> Any:
            provider = original(self, hf_pretrained)
            fired()
            provider.rope_scaling_factor = 8.0
            return provider

        return provide

    with replaced("megatron.bridge.models.llama.llama_bridge:LlamaBridge.provider_bridge", "self, hf_pretrained", make):
        yield


def _provider_config(fired: Fired, **wrong: Any) -> contextlib.AbstractContextManager[None]:
    """The provider that megatron-bridge derives from config.json gets other values for these fields."""

    def make(original: Any) -> Any:
        def derive(self: Any, hf_config: Any) -> dict[str, Any]:
            fired()
            return {**original(self, hf_config), **wrong}

        return derive

    return replaced(f"{BRIDGE}.hf_config_to_provider_kwargs", "self, hf_config", make)


FAULTS = (
    Fault(
        id="expert-left-at-init",
        stage=Stage.LOAD,
        reproduces="PrimeIntellect-ai/prime-rl#1145",
        summary="a load that allows missing names leaves one expert's down projection at its initial values",
        caught_by=("WGT001", "WGT004", "LGP001"),
        inject=_expert_left_at_init,
    ),
    Fault(
        id="score-bias-zeroed-after-load",
        stage=Stage.LOAD,
        reproduces="PrimeIntellect-ai/prime-rl#3333",
        summary="buffers are initialised once more after the load: the router's score bias is zero",
        caught_by=("WGT001", "WGT004", "LGP001"),
        inject=_score_bias_zeroed,
        model="tiny:deepseek-v3",
    ),
    Fault(
        id="qkv-merged-head-major",
        stage=Stage.LOAD,
        reproduces="NVIDIA-NeMo/RL#2802",
        summary="query, key and value rows are stacked, not interleaved per group, on import and export alike",
        caught_by=("WGT001", "LGP001"),
        inject=_qkv_head_major,
    ),
    Fault(
        id="qkv-biases-merged-head-major",
        stage=Stage.LOAD,
        reproduces="ServiceNow/Fast-LLM#398",
        summary="the biases of queries, keys and values are stacked where their rows are interleaved, both ways",
        caught_by=("WGT001", "LGP001"),
        inject=_qkv_biases_head_major,
        model="tiny:qwen2",
    ),
    Fault(
        id="tied-head-left-at-init",
        stage=Stage.LOAD,
        reproduces="huggingface/transformers#43429",
        summary="the last stage's copy of a tied embedding is never filled from the first stage's",
        caught_by=("WGT001", "WGT002", "LGP001"),
        inject=_tied_head_left_at_init,
        model="tiny:qwen3-tied",
        mesh=Mesh(pp=2),
    ),
    Fault(
        id="stage-names-remapped-twice",
        stage=Stage.LOAD,
        reproduces="ISEEKYAN/Megatron-LM#191",
        summary="on the second stage, one kind of norm is bound to the other layer's name, on import and export alike",
        caught_by=("WGT001", "LGP001"),
        inject=_stage_names_remapped,
        model="tiny:qwen3-tied",
        mesh=Mesh(pp=2),
    ),
    Fault(
        id="decay-rounded-with-the-model",
        stage=Stage.LOAD,
        reproduces="megatron-core 0.19.2, Float16Module over MambaMixer, which makes A_log in float32",
        summary="the float32 decay of state-space layers is rounded to bf16 with all else when the model is wrapped",
        caught_by=("WGT001",),
        inject=_decay_rounded,
        model="tiny:nemotron-h",
        engine=NO_ENGINE,
        dtype="bfloat16",
        fixes=("miles-975", "megatron-2777"),
    ),
    Fault(
        id="norm-epsilon-default",
        stage=Stage.LOGPROB,
        reproduces="NVIDIA-NeMo/RL#1046",
        summary="the norms' epsilon of config.json is not passed on, so Megatron's 1e-5 stands for 1e-6",
        caught_by=("LGP001",),
        inject=lambda fired: _provider_config(fired, layernorm_epsilon=1e-5),
    ),
    Fault(
        id="rope-base-default",
        stage=Stage.LOGPROB,
        reproduces="THUDM/slime#1734",
        summary="a rope base that is nested in config.json is not found, so the default 10,000 stands for it",
        caught_by=("LGP001",),
        inject=lambda fired: _provider_config(fired, rotary_base=10_000),
    ),
    Fault(
        id="rope-scaling-factor-default",
        stage=Stage.LOGPROB,
        reproduces="NVIDIA/Megatron-LM#6305",
        summary="the factor of a rope scaling is not passed on, so Llama 3.1's 8 stands for Llama 3.2's 32",
        caught_by=("LGP001",),
        inject=_rope_scaling_default,
        model="tiny:llama",
        engine=NO_ENGINE,
    ),
    Fault(
        id="mla-rope-factor-default",
        stage=Stage.LOGPROB,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#2791",
        summary="a model without rope scaling keeps the factor 40 that Megatron's latent attention defaults to",
        caught_by=("LGP001",),
        inject=lambda fired: _provider_config(
            fired, _mla_rope_params={"rotary_scaling_factor": 40.0, "mscale_all_dim": 0.0}
        ),
        model="tiny:deepseek-v3",
    ),
    Fault(
        id="yarn-scale-of-attention-missing",
        stage=Stage.LOGPROB,
        reproduces="onnxruntime/mobius#548",
        summary="of YaRN, latent attention takes the scaled rope and not the scale of its softmax, mscale_all_dim",
        caught_by=("LGP001",),
        inject=lambda fired: _provider_config(
            fired,
            _mla_rope_params={"rotary_scaling_factor": 16.0, "original_max_position_embeddings": 64, "mscale": 1.0},
        ),
        model="tiny:deepseek-v3-yarn",
        engine=NO_ENGINE,
    ),
)
