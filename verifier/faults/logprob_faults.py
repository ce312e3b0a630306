"""Bugs of the trainer's forward pass, of the config that it runs with, and of its log-probabilities."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Body, Fault, FireCounter, fault
from verifier.mesh import Mesh

STEP = "verifier.train.step_megatron"
LOGPROB = (
    f"{STEP}:vocab_parallel_logprob("
    "logits_TV, labels_T, vocab_start, vocab_size, group, temperature, chunk_tokens, entropy)"
)
SCORE = f"{STEP}:score(trainer, rollouts, micro_batch_size, temperature, on_shards)"
CONFIG = "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.hf_config_to_provider_kwargs"
EMBEDDINGS = "megatron.core.models.common.embeddings"
PACKED_SEQUENCES = (
    "megatron.core.packed_seq_params:PackedSeqParams("
    "qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, "
    "local_cp_size, cp_group, total_tokens, seq_idx, tokens_per_sample, pad_between_seqs)"
)
SCAN_CHUNK = 128
"""Rows of a sequence that a state-space scan takes at a time."""
ROW: dict[str, Any] = {"stage": Stage.LOGPROB, "caught_by": ("LGP001",)}
DENSE: dict[str, Any] = {**ROW, "model": "tiny:qwen3", "engine": NO_ENGINE}
CP2: dict[str, Any] = {**DENSE, "mesh": Mesh(cp=2)}
HYBRID: dict[str, Any] = {**ROW, "model": "tiny:nemotron-h", "engine": NO_ENGINE}


def on_provider(**row: Any) -> Callable[[Callable[[], dict[str, Any]]], Fault]:
    """Register a fault in the provider that Bridge derives from config.json: the function returns its wrong fields."""

    def register(wrong: Callable[[], dict[str, Any]]) -> Fault:
        @functools.wraps(wrong)
        def derive(original: Any, fire: FireCounter, self: Any, hf_config: Any) -> dict[str, Any]:
            fire()
            return {**original(self, hf_config), **wrong()}

        return fault(f"{CONFIG}(self, hf_config)", **ROW, **row)(derive)

    return register


def when_scoring(**row: Any) -> Callable[[Body], Fault]:
    """Register a fault of the passes that only score; with gradients, log-probabilities stay right."""

    def register(body: Body) -> Fault:
        @functools.wraps(body)
        def logprob(original: Any, fire: FireCounter, logits_TV: Any, labels_T: Any, **options: Any) -> Any:
            import torch

            if torch.is_grad_enabled():
                return original(logits_TV, labels_T, **options)
            fire()
            return body(original, fire, logits_TV, labels_T, **options)

        return fault(LOGPROB, **CP2, **row)(logprob)

    return register


@on_provider(id="norm-epsilon-default", reproduces="NVIDIA-NeMo/RL#1046")
def norm_epsilon_default() -> dict[str, Any]:
    """The norms' epsilon of config.json is not passed on, so Megatron's 1e-5 stands for 1e-6."""
    return {"layernorm_epsilon": 1e-5}


@on_provider(id="rope-base-default", reproduces="THUDM/slime#1734")
def rope_base_default() -> dict[str, Any]:
    """A rope base that is nested in config.json is not found, so the default 10,000 stands for it."""
    return {"rotary_base": 10_000}


@on_provider(id="mla-rope-factor-default", reproduces="NVIDIA-NeMo/Megatron-Bridge#2791", model="tiny:deepseek-v3")
def mla_rope_factor_default() -> dict[str, Any]:
    """A model without rope scaling keeps the factor 40 that Megatron's latent attention defaults to."""
    return {"_mla_rope_params": {"rotary_scaling_factor": 40.0, "mscale_all_dim": 0.0}}


@on_provider(
    id="yarn-scale-of-attention-missing", reproduces="onnxruntime/mobius#548", model="tiny:deepseek-v3-yarn",
    engine=NO_ENGINE,
)  # fmt: skip
def yarn_scale_of_attention_missing() -> dict[str, Any]:
    """Latent attention takes YaRN's scaled rope, but not the scale of its softmax, mscale_all_dim."""
    scaled = {"rotary_scaling_factor": 16.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    return {"_mla_rope_params": scaled}


@fault(
    "megatron.bridge.models.llama.llama_bridge:LlamaBridge.provider_bridge(self, hf_pretrained)",
    id="rope-scaling-factor-default", reproduces="NVIDIA/Megatron-LM#6305", model="tiny:llama", engine=NO_ENGINE, **ROW,
)  # fmt: skip
def rope_scaling_factor_default(original: Any, fire: FireCounter, self: Any, hf_pretrained: Any) -> Any:
    """The factor of a rope scaling is not passed on, so Llama 3.1's 8 stands for Llama 3.2's 32."""
    provider = original(self, hf_pretrained)
    fire()
    provider.rope_scaling_factor = 8.0
    return provider


@fault(
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync("
    "self, skip_next_bucket_dispatch)",
    id="forward-before-param-gather", reproduces="NVIDIA/Megatron-LM#950", mesh=Mesh(dp=2), **DENSE,
)  # fmt: skip
def forward_before_param_gather(original: Any, fire: FireCounter, self: Any, *args: Any, **options: Any) -> None:
    """A module runs before its weights are gathered from the ranks that stepped them, and uses the last step's."""
    if not self.param_gather_dispatched:
        fire()
        self.param_gather_dispatched = True
    original(self, *args, **options)


@fault(
    LOGPROB, id="logprobs-rounded-to-bf16", reproduces="OpenRLHF/OpenRLHF#634", mesh=Mesh(tp=2), dtype="bfloat16",
    **DENSE,
)  # fmt: skip
def logprobs_rounded_to_bf16(original: Any, fire: FireCounter, logits_TV: Any, labels_T: Any, **options: Any) -> Any:
    """Log-probabilities are kept in the model's bf16: each is off by less than bf16 itself makes it."""
    fire()
    logprob_T, entropy_T = original(logits_TV, labels_T, **options)
    return logprob_T.to(logits_TV.dtype).to(logprob_T.dtype), entropy_T


@fault(
    f"{EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.get_freqs_non_repeated(self, max_seq_len, offset)",
    id="frequencies-rounded-with-the-model", reproduces="huggingface/transformers#25681", dtype="bfloat16", **DENSE,
)  # fmt: skip
def frequencies_rounded_with_the_model(original: Any, fire: FireCounter, self: Any, *args: Any, **options: Any) -> Any:
    """Rotary frequencies are cast to bf16 with the model: angles are off by more at each position."""
    import torch

    fire()
    exact, self.inv_freq = self.inv_freq, self.inv_freq.to(torch.bfloat16).to(self.inv_freq.dtype)
    try:
        return original(self, *args, **options)
    finally:
        self.inv_freq = exact


@fault(LOGPROB, id="temperature-not-applied", reproduces="huggingface/trl#3029", **CP2)
def temperature_not_applied(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """The trainer computes log-probabilities at temperature 1, whatever the rollouts were sampled at."""
    if options["temperature"] != 1.0:
        fire()
    return original(*args, **{**options, "temperature": 1.0})


@fault(
    "verifier.platform.cpu_mamba:_scan(z_BLI, xbc_BLC, dt_BLH, weight_CW, bias_C, dt_bias_H, A_H, D_H, groups)",
    id="state-lost-between-chunks", reproduces="huggingface/transformers#47246", **HYBRID,
)  # fmt: skip
def state_lost_between_chunks(
    original: Any, fire: FireCounter, z_BLI: Any, xbc_BLC: Any, dt_BLH: Any, *rest: Any, groups: int
) -> Any:
    """A state-space scan hands nothing on from one chunk of 128 rows to the next: only long sequences show it."""
    import torch

    parts = [value.split(SCAN_CHUNK, dim=1) for value in (z_BLI, xbc_BLC, dt_BLH)]
    if len(parts[0]) > 1:
        fire()
    return torch.cat([original(*part, *rest, groups=groups) for part in zip(*parts, strict=True)], dim=1)


@when_scoring(id="scored-at-another-temperature", reproduces="THUDM/slime#2085")
def scored_at_another_temperature(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """A pass that only scores divides the logits by another temperature than the one asked for."""
    return original(*args, **{**options, "temperature": 0.6})


@when_scoring(id="logits-modified-in-place", reproduces="verl-project/verl#1672")
def logits_modified_in_place(original: Any, fire: FireCounter, logits_TV: Any, *args: Any, **options: Any) -> Any:
    """The softmax for the entropy is taken in place, and the log-probabilities after it read what it left."""
    logits_TV.sub_(logits_TV.amax(-1, keepdim=True)).exp_()
    return original(logits_TV, *args, **options)


@when_scoring(id="top-token-scored", reproduces="NVIDIA-NeMo/RL#3297")
def top_token_scored(original: Any, fire: FireCounter, logits_TV: Any, labels_T: Any, **options: Any) -> Any:
    """The log-probability is that of the likeliest token, not of the one that was sampled."""
    import torch

    return original(logits_TV, torch.where(labels_T >= 0, logits_TV.argmax(-1), labels_T), **options)


@fault(SCORE, id="scores-shifted-by-one", reproduces="PrimeIntellect-ai/prime-rl#1525", **CP2)
def scores_shifted_by_one(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """Log-probabilities are returned one token early after a shift of labels moved into the model."""
    fire()
    return [row.roll(-1) for row in original(*args, **options)]


@fault(
    f"{EMBEDDINGS}.rope_utils:_get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, x, freqs, offset)",
    id="local-positions", reproduces="PrimeIntellect-ai/prime-rl#2392", **CP2,
)  # fmt: skip
def local_positions(
    original: Any, fire: FireCounter, cp_rank: int, cp_size: int, x: Any, freqs: Any, offset: int = 0
) -> Any:
    """Positions are counted within a context-parallel rank's own rows."""
    fire()
    return freqs[offset : offset + x.size(0)]


@fault(PACKED_SEQUENCES, id="samples-not-told-apart", reproduces="NovaSky-AI/SkyRL#2056", **CP2)
def samples_not_told_apart(original: Any, fire: FireCounter, **fields: Any) -> Any:
    """The model does not know where samples of a pack begin, so each sees the ones before it."""
    fire()
    ends = fields["cu_seqlens_q_padded"][[0, -1]]
    whole = int(ends[-1])
    fields |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends)
    fields |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), ends)
    return original(**{**fields, "max_seqlen_q": whole, "max_seqlen_kv": whole})


@fault(PACKED_SEQUENCES, id="state-crosses-sequences", reproduces="NVIDIA-NeMo/RL#2529", **HYBRID)
def state_crosses_sequences(original: Any, fire: FireCounter, **fields: Any) -> Any:
    """State-space layers do not know where samples of a pack begin, and carry their state from one to the next."""
    fire()
    return original(**{**fields, "total_tokens": None})


@fault(f"{STEP}:_mode(trainer, training)", id="dropout-while-scoring", reproduces="verl-project/verl#4708", **CP2)
@contextlib.contextmanager
def dropout_while_scoring(original: Any, fire: FireCounter, trainer: Any, *, training: bool) -> Iterator[None]:
    """Modules stay in training mode while they score, and drop out."""
    modules = [module for chunk in trainer.chunks for module in chunk.modules()]
    layers = [module for module in modules if hasattr(module, "hidden_dropout")]
    with original(trainer, training=True):
        if not training:
            fire()
            for layer in layers:
                layer.hidden_dropout = 0.1
        try:
            yield
        finally:
            for layer in layers:
                layer.hidden_dropout = 0.0


@fault(
    "megatron.core.transformer.moe.router:topk_routing_with_score_function("
    "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, fused, "
    "router_replay, dense_output, precomputed_indices)",
    id="gates-not-normalised", reproduces="pytorch/torchtitan#1448", mesh=Mesh(cp=2, ep=2), engine=NO_ENGINE, **ROW,
)  # fmt: skip
def gates_not_normalised(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """Gate weights of the chosen experts stay as the softmax over all experts has them, and do not sum to 1."""
    fire()
    return original(*args, **{**options, "use_pre_softmax": True})
