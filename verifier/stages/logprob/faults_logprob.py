"""Bugs of the trainer's forward pass, of the config that it runs with, and of its log-probabilities."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, TRAINING, Call, fault, held, kind
from verifier.mesh import Mesh

STEP = "verifier.train.step_megatron"
LOGPROB = f"{STEP}:vocab_parallel_logprob(logits_TV, labels_T, vocab_start, group, temperature, chunk_tokens, entropy)"
SCORE = f"{STEP}:score(trainer, rollouts, micro_batch_size, temperature, on_shards, on_rows, max_tokens, read)"
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
in_logprobs = functools.partial(fault, stage=Stage.LOGPROB, caught_by=("LGP001",), model="tiny:qwen3", engine=NO_ENGINE)
on_cp2 = functools.partial(in_logprobs, mesh=Mesh(cp=2))


@kind(f"{CONFIG}(self, hf_config)", **ROW)
def on_provider(wrong: Callable[[], dict[str, Any]], call: Call) -> dict[str, Any]:
    """Derive a wrong provider from config.json, as Bridge does: the function returns its wrong fields."""
    return {**call.faulty(), **wrong()}


@on_provider("NVIDIA-NeMo/RL#1046")
def norm_epsilon_default() -> dict[str, Any]:
    """The norms' epsilon of config.json is not passed on, so Megatron's 1e-5 stands for 1e-6."""
    return {"layernorm_epsilon": 1e-5}


@on_provider("THUDM/slime#1734")
def rope_base_default() -> dict[str, Any]:
    """A rope base that is nested in config.json is not found, so the default 10,000 stands for it."""
    return {"rotary_base": 10_000}


@on_provider(
    "megatron-bridge 0.6.2, hf_config_to_provider_kwargs, which passes `truncate` on where config.json has it alone",
    model="tiny:qwen3-yarn", engine=NO_ENGINE,
)  # fmt: skip
def range_of_yarn_not_rounded() -> dict[str, Any]:
    """The pairs between which YaRN begins and ends to stretch a rope are no whole numbers, as they should be."""
    return {"yarn_correction_range_round_to_int": None}


@on_provider("huggingface/transformers#38002", model="tiny:qwen2", engine=NO_ENGINE, caught_by=("LGP007",))
def window_without_its_switch() -> dict[str, Any]:
    """Layers get a sliding window although config.json switches it off; no sequence is as long as it."""
    return {"window_size": (1022, 0)}


@on_provider("NVIDIA-NeMo/Megatron-Bridge#5097", model="tiny:add", engine=TRAINING, caught_by=("LGP007",))
def window_in_training() -> dict[str, Any]:
    """A training run's layers get a sliding window that config.json does not have; no sequence is as long as it."""
    return {"window_size": (1022, 0)}


@on_provider("NVIDIA-NeMo/Megatron-Bridge#2791", model="tiny:deepseek-v3")
def mla_rope_factor_default() -> dict[str, Any]:
    """A model without rope scaling keeps the factor 40 that Megatron's latent attention defaults to."""
    return {"_mla_rope_params": {"rotary_scaling_factor": 40.0, "mscale_all_dim": 0.0}}


@on_provider("onnxruntime/mobius#548", model="tiny:deepseek-v3-yarn", engine=NO_ENGINE)
def yarn_scale_of_attention_missing() -> dict[str, Any]:
    """Latent attention takes YaRN's scaled rope, but not the scale of its softmax, mscale_all_dim."""
    scaled = {"rotary_scaling_factor": 16.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    return {"_mla_rope_params": scaled}


@in_logprobs(
    "NVIDIA/Megatron-LM#6305",
    "megatron.bridge.models.llama.llama_bridge:LlamaBridge.provider_bridge(self, hf_pretrained)", model="tiny:llama",
)  # fmt: skip
def rope_scaling_factor_default(call: Call) -> Any:
    """The factor of a rope scaling is not passed on, so Llama 3.1's 8 stands for Llama 3.2's 32."""
    provider = call.faulty()
    provider.rope_scaling_factor = 8.0
    return provider


@in_logprobs("OpenRLHF/OpenRLHF#634", LOGPROB, mesh=Mesh(tp=2), dtype="bfloat16")
def logprobs_rounded_to_bf16(call: Call) -> Any:
    """Log-probabilities are kept in the model's bf16: each is off by less than bf16 itself makes it."""
    logprob_T, entropy_T = call.faulty()
    return logprob_T.to(call.logits_TV.dtype).to(logprob_T.dtype), entropy_T


@in_logprobs(
    "huggingface/transformers#25681",
    f"{EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.get_freqs_non_repeated(self, max_seq_len, offset)",
    dtype="bfloat16",
)
def frequencies_rounded_with_the_model(call: Call) -> Any:
    """Rotary frequencies are cast to bf16 with the model: angles are off by more at each position."""
    exact = call.self.inv_freq
    with held(call.self, inv_freq=exact.bfloat16().to(exact.dtype)):
        return call.faulty()


@in_logprobs(
    "vllm-project/vllm-ascend#1266",
    f"{EMBEDDINGS}.rotary_pos_embedding:RotaryEmbedding.get_freqs_non_repeated(self, max_seq_len, offset)",
    model="tiny:qwen3-moe",
)
def table_of_angles_too_short(call: Call) -> Any:
    """The table of angles ends at position 255, and later positions get its last."""
    angles = call.faulty()
    angles[256:] = angles[255:256]
    return angles


@on_cp2("huggingface/trl#3029", LOGPROB)
def temperature_not_applied(call: Call) -> Any:
    """The trainer computes log-probabilities at temperature 1, whatever the rollouts were sampled at."""
    return call.original() if call.temperature == 1 else call.faulty(temperature=1.0)


@in_logprobs(
    "huggingface/transformers#47246",
    "verifier.platform.cpu_mamba:_scan(z_BLI, xbc_BLC, dt_BLH, weight_CW, bias_C, dt_bias_H, A_H, D_H, groups)",
    model="tiny:nemotron-h",
)
def state_lost_between_chunks(call: Call) -> Any:
    """A state-space scan hands nothing on from one chunk of 128 rows to the next: only long sequences show it."""
    import torch

    parts = [value.split(SCAN_CHUNK, dim=1) for value in (call.z_BLI, call.xbc_BLC, call.dt_BLH)]
    if len(parts[0]) > 1:
        call.fire()
    scanned = [call.original(z_BLI=z, xbc_BLC=xbc, dt_BLH=dt) for z, xbc, dt in zip(*parts, strict=True)]
    return torch.cat(scanned, dim=1)


@on_cp2("PrimeIntellect-ai/prime-rl#1525", SCORE)
def scores_shifted_by_one(call: Call) -> Any:
    """Log-probabilities are returned one token early after a shift of labels moved into the model."""
    return [row.roll(-1) for row in call.faulty()]


@on_cp2(
    "PrimeIntellect-ai/prime-rl#2392",
    f"{EMBEDDINGS}.rope_utils:fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_size, cp_rank, interleaved)",
)
def local_positions(call: Call) -> Any:
    """Positions are counted within a context-parallel rank's own rows."""
    return call.faulty(cu_seqlens=call.cu_seqlens // call.cp_size, cp_size=1, cp_rank=0)


@on_cp2("NovaSky-AI/SkyRL#2056", PACKED_SEQUENCES)
def samples_not_told_apart(call: Call) -> Any:
    """The model does not know where samples of a pack begin, so each sees the ones before it."""
    ends = call.cu_seqlens_q_padded[[0, -1]]
    whole = int(ends[-1])
    return call.faulty(
        cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
        max_seqlen_q=whole, max_seqlen_kv=whole,
    )  # fmt: skip


@fault(
    "NVIDIA-NeMo/RL#4070",
    PACKED_SEQUENCES,
    stage=Stage.LOGPROB,
    caught_by=("LGP008",),
    model="tiny:qwen3",
    engine=NO_ENGINE,
    mesh=Mesh(cp=2),
)
def padding_told_as_tokens(call: Call) -> Any:
    """The model is told that padding belongs to the samples before it, and that none lies between samples."""
    padded = call.cu_seqlens_q_padded
    return call.faulty(cu_seqlens_q=padded, cu_seqlens_kv=padded, pad_between_seqs=False)


@fault(
    "NVIDIA/TransformerEngine#3331",
    PACKED_SEQUENCES,
    stage=Stage.LOGPROB,
    caught_by=("LGP008",),
    model="tiny:qwen3",
    engine=NO_ENGINE,
    mesh=Mesh(cp=2),
)
def padding_after_the_last_untold(call: Call) -> Any:
    """A pack with padding after its last sequence alone is told to the model as one without padding."""
    ends, padded = call.cu_seqlens_q, call.cu_seqlens_q_padded
    return call.faulty(pad_between_seqs=not ends[:-1].equal(padded[:-1]))


@in_logprobs("NVIDIA-NeMo/RL#2529", PACKED_SEQUENCES, model="tiny:nemotron-h")
def state_crosses_sequences(call: Call) -> Any:
    """State-space layers do not know where samples of a pack begin, and carry their state from one to the next."""
    return call.faulty(total_tokens=None)


@on_cp2("verl-project/verl#4708", f"{STEP}:_mode(trainer, training)")
@contextlib.contextmanager
def dropout_while_scoring(call: Call) -> Iterator[None]:
    """Modules stay in training mode while they score, and drop out."""
    modules = [module for chunk in call.trainer.chunks for module in chunk.modules()]
    layers = [module for module in modules if hasattr(module, "hidden_dropout")]
    with call.original(training=True), contextlib.ExitStack() as stack:
        if not call.training:
            call.fire()
            for layer in layers:
                stack.enter_context(held(layer, hidden_dropout=0.1))
        yield


@in_logprobs(
    "pytorch/torchtitan#1448",
    "megatron.core.transformer.moe.router:topk_routing_with_score_function("
    "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, fused, "
    "router_replay, dense_output, precomputed_indices)",
    model="tiny:qwen3-moe", mesh=Mesh(cp=2, ep=2),
)  # fmt: skip
def gates_not_normalised(call: Call) -> Any:
    """Gate weights of the chosen experts stay as the softmax over all experts has them, and do not sum to 1."""
    return call.faulty(use_pre_softmax=True)


POLICY: dict[str, Any] = {"stage": Stage.LOGPROB, "engine": TRAINING, "model": "tiny:add"}
WORKER = "verifier.trainer.worker_megatron:TrainerWorker"
WITH_REFERENCE = ("algorithm=grpo", "grpo.kl_weight=0.1")


@fault(
    "THUDM/slime#914", f"{WORKER}._weights_of(self, which)", **POLICY, caught_by=("LGP010",), training=WITH_REFERENCE
)  # fmt: skip
def reference_is_the_policy(call: Call) -> Any:
    """The reference's pass calls the policy, so the KL is 0 for ever."""
    return call.original() if call.which == "current" else call.faulty(which="current")


@fault(
    "NVIDIA-NeMo/RL#316", LOGPROB, stage=Stage.LOGPROB, engine=TRAINING, model="tiny:add", caught_by=("LGP001",),
    training=("algorithm=grpo", "verify.every=1", "grpo.temperature=0.7"),
)  # fmt: skip
def temperature_left_out_of_training(call: Call) -> Any:
    """The trainer divides no logits by the temperature, when it scores and when it trains: its ratios are 1."""
    return call.faulty(temperature=1.0)


@fault(
    "megatron-bridge 0.6.2, OLMoESelfAttention, whose norm of queries has the width of all heads on every rank",
    "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors("
    "self, hidden_states, key_value_states, output_gate, split_qkv)",
    stage=Stage.LOGPROB, model="tiny:qwen3", mesh=Mesh(tp=2), engine=NO_ENGINE, caught_by=("STK001",),
)  # fmt: skip
def norm_wider_than_its_shard(call: Call) -> Any:
    """The norm of queries is as wide as all heads together on every tensor-parallel rank, and its first pass raises."""
    import torch

    with held(call.self, q_layernorm=torch.nn.RMSNorm(call.self.config.hidden_size)):
        return call.faulty()


@fault(
    "Blaizzy/mlx-vlm#841", "megatron.bridge.peft.utils:ParallelLinearAdapter.forward(self, x, args, kwargs)",
    stage=Stage.LOGPROB, engine=TRAINING, model="tiny:add", caught_by=("LGP016",),
    training=("lora.rank=8", "lora.alpha=16", "dtype=bf16"),
)  # fmt: skip
def adapter_scaled_by_alpha(call: Call) -> Any:
    """Adapters are multiplied by alpha in training, and by alpha over rank where they are merged for the export."""
    return call.faulty() * call.self.dim


@fault(
    "verl-project/verl#4708", "megatron.bridge.peft.utils:ParallelLinearAdapter.forward(self, x, args, kwargs)",
    stage=Stage.LOGPROB, engine=TRAINING, model="tiny:add", caught_by=("LGP016",),
    training=("lora.rank=8", "dtype=bf16"),
)  # fmt: skip
def adapter_drops_out_of_its_input(call: Call) -> Any:
    """Adapters keep the dropout of their class's usual config, 0.1 of their input, and nothing switches it off."""
    import torch

    if not torch.is_grad_enabled():
        return call.original()
    with held(call.self, dropout=torch.nn.Dropout(0.1)):
        return call.faulty()
