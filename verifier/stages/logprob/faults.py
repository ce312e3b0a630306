"""Bugs of the trainer's forward pass, of the config that it runs with, and of its log-probabilities."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault, held, in_training, kind
from verifier.mesh import Mesh
from verifier.stages.load.faults import LOAD_WEIGHTS

STEP = "verifier.megatron.step_megatron"
LOGPROB = f"{STEP}:vocab_parallel_logprob(logits_TV, labels_T, vocab_start, group, temperature, chunk_tokens, entropy)"
SCORE = f"{STEP}:score(trainer, rollouts, micro_batch_size, temperature, on_shards, on_rows, max_tokens, read)"
CONFIG = "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.hf_config_to_provider_kwargs"
EMBEDDINGS = "megatron.core.models.common.embeddings"
PACKED_SEQUENCES = (
    "megatron.core.packed_seq_params:PackedSeqParams("
    "qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, "
    "local_cp_size, cp_group, total_tokens, seq_idx, tokens_per_sample, pad_between_seqs)"
)
SCAN = "verifier.platform.cpu_mamba:_scan(z_BLI, xbc_BLC, dt_BLH, weight_CW, bias_C, dt_bias_H, A_H, D_H, groups)"
SCAN_CHUNK = 128
"""Rows of a sequence that a state-space scan takes at a time."""
DELTA_NET = "megatron.core.ssm.gated_delta_net"
GATES = f"{DELTA_NET}.common:_GDNBase._compute_g_and_beta(self, A_log_local_cp, dt_bias_local_cp, alpha, beta)"
WORKER = "verifier.trainer.worker_megatron:TrainerWorker"
ATTEND = "verifier.platform.cpu_attention:TEDotProductAttention._attend_all(self, query, key, value, lengths, padded)"
UNSAMPLED = ("algorithm=grpo", "grpo.mini_batches=2", "verify.every=0")
on_logprobs = functools.partial(in_training, stage=Stage.LOGPROB)
in_bf16 = functools.partial(on_logprobs, training=("dtype=bf16",))
in_logprobs = functools.partial(fault, stage=Stage.LOGPROB, caught_by=("LGP001",), model="tiny:qwen3", engine=NO_ENGINE)
on_cp2 = functools.partial(in_logprobs, mesh=Mesh(cp=2))


@kind(f"{CONFIG}(self, hf_config)", stage=Stage.LOGPROB, caught_by=("LGP001",))
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


@on_provider("onnxruntime/mobius#548", model="tiny:deepseek-v3-yarn", engine=NO_ENGINE)
def yarn_scale_of_attention_missing() -> dict[str, Any]:
    """Latent attention takes YaRN's scaled rope, but not the scale of its softmax, mscale_all_dim."""
    numbers = {"original_max_position_embeddings": 64, "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 1.0}
    return {"_mla_rope_params": {"rotary_scaling_factor": 16.0, **numbers}}


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


@on_cp2("huggingface/trl#3029", LOGPROB)
def temperature_not_applied(call: Call) -> Any:
    """The trainer computes log-probabilities at temperature 1, whatever the rollouts were sampled at."""
    return call.original() if call.temperature == 1 else call.faulty(temperature=1.0)


@in_logprobs("huggingface/transformers#47246", SCAN, model="tiny:nemotron-h")
def state_lost_between_chunks(call: Call) -> Any:
    """A state-space scan hands nothing on from one chunk of 128 rows to the next: only long sequences show it."""
    import torch

    parts = [value.split(SCAN_CHUNK, dim=1) for value in (call.z_BLI, call.xbc_BLC, call.dt_BLH)]
    if len(parts[0]) > 1:
        call.fire()
    scanned = [call.original(z_BLI=z, xbc_BLC=xbc, dt_BLH=dt) for z, xbc, dt in zip(*parts, strict=True)]
    return torch.cat(scanned, dim=1)


@in_logprobs("ml-explore/mlx-lm#1026", SCAN, model="tiny:nemotron-h")
def time_steps_raised_to_a_bound(call: Call) -> Any:
    """Time steps of state-space layers are raised to 0.001, by which published weights begin; nothing bounds them."""
    least = math.log(math.expm1(1e-3)) - call.dt_bias_H
    if (call.dt_BLH < least).any():
        call.fire()
    return call.original(dt_BLH=call.dt_BLH.maximum(least))


@in_logprobs(
    "sgl-project/sglang#3705",
    "megatron.core.transformer.moe.moe_utils:group_limited_topk("
    "scores, topk, num_tokens, num_experts, num_groups, group_topk)",
    model="tiny:deepseek-v3",
)
def closed_groups_score_zero(call: Call) -> Any:
    """Experts of groups that are not chosen get a score of 0, which is above negative scores of experts that are."""
    groups = call.scores.unflatten(-1, (call.num_groups, -1))
    best = groups.topk(call.topk // call.group_topk).values.sum(-1).topk(call.group_topk).indices
    chosen = groups.new_zeros(groups.shape[:2]).scatter(1, best, 1.0)[..., None]
    return call.wrong((groups * chosen).flatten(1).topk(call.topk))


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


@on_cp2("NVIDIA-NeMo/RL#4070", PACKED_SEQUENCES, caught_by=("LGP008",))
def padding_told_as_tokens(call: Call) -> Any:
    """The model is told that padding belongs to the samples before it, and that none lies between samples."""
    padded = call.cu_seqlens_q_padded
    return call.faulty(cu_seqlens_q=padded, cu_seqlens_kv=padded, pad_between_seqs=False)


@in_logprobs("NVIDIA-NeMo/RL#2529", PACKED_SEQUENCES, model="tiny:nemotron-h")
def state_crosses_sequences(call: Call) -> Any:
    """State-space layers do not know where samples of a pack begin, and carry their state from one to the next."""
    return call.faulty(total_tokens=None)


@in_logprobs(
    "THUDM/slime#1686",
    f"{DELTA_NET}.gdn:chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, "
    "use_qk_l2norm_in_kernel, cu_seqlens)",
    model="tiny:qwen3_next",
)
def delta_state_crosses_sequences(call: Call) -> Any:
    """Gated delta nets carry their state from one sample of a pack to the next; their convolutions do not."""
    return call.original() if call.cu_seqlens is None or len(call.cu_seqlens) < 3 else call.faulty(cu_seqlens=None)


@in_logprobs("NVIDIA-NeMo/Automodel#2484", GATES, model="tiny:qwen3_next")
def decay_of_delta_nets_in_bfloat16(call: Call) -> Any:
    """The logarithm of the decay is rounded to bf16 before the scan, which adds it up over all tokens."""
    decay, rate = call.faulty()
    return decay.bfloat16().to(decay.dtype), rate


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


@on_logprobs(
    "THUDM/slime#914", f"{WORKER}._weights_of(self, which)", caught_by=("LGP010",),
    training=("algorithm=grpo", "grpo.kl_weight=0.1"),
)  # fmt: skip
def reference_is_the_policy(call: Call) -> Any:
    """The reference's pass calls the policy, so the KL is 0 for ever."""
    return call.original() if call.which == "current" else call.faulty(which="current")


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


@on_logprobs(
    "Blaizzy/mlx-vlm#841", "megatron.bridge.peft.utils:ParallelLinearAdapter.forward(self, x, args, kwargs)",
    caught_by=("LGP016",), training=("lora.rank=8", "lora.alpha=16", "dtype=bf16"),
)  # fmt: skip
def adapter_scaled_by_alpha(call: Call) -> Any:
    """Adapters are multiplied by alpha in training, and by alpha over rank where they are merged for the export."""
    return call.faulty() * call.self.dim


@fault(
    "NVIDIA-NeMo/Megatron-Bridge#4610",
    "megatron.bridge.models.gemma.gemma2_bridge:Gemma2Bridge.provider_bridge(self, hf_pretrained)",
    stage=Stage.LOGPROB, engine=NO_ENGINE, caught_by=("LGP007", "LGP001"), model="tiny:gemma2", fixes=("bridge-5712",),
)  # fmt: skip
def bound_of_logits_not_passed_on(call: Call) -> Any:
    """The bound of the last logits in config.json is not passed on: every token is as likely among its neighbours."""
    provider = call.faulty()
    provider.final_logit_softcapping = None
    return provider


@on_logprobs(
    "verl-project/verl#4708", "megatron.bridge.peft.utils:ParallelLinearAdapter.forward(self, x, args, kwargs)",
    caught_by=("LGP016",), training=("lora.rank=8", "dtype=bf16"),
)  # fmt: skip
def adapter_drops_out_of_its_input(call: Call) -> Any:
    """Adapters keep the dropout of their class's usual config, 0.1 of their input, and nothing switches it off."""
    import torch

    if not torch.is_grad_enabled():
        return call.original()
    with held(call.self, dropout=torch.nn.Dropout(0.1)):
        return call.faulty()


@in_logprobs(
    "PrimeIntellect-ai/prime-rl#2952",
    "megatron.bridge.models.deepseek.deepseek_v3_bridge:DeepSeekV3Bridge.provider_bridge(self, hf_pretrained)",
    caught_by=("LGP007",), model="tiny:deepseek-v3", dtype="bfloat16",
)  # fmt: skip
def routers_in_the_models_dtype(call: Call) -> Any:
    """Routers that the model has in float32 compute in bf16, below the noise of bf16."""
    provider = call.faulty()
    provider.moe_router_dtype = None
    return provider


@on_logprobs(
    "OpenRLHF/OpenRLHF#1319", LOGPROB, caught_by=("LGP012",),
    training=("algorithm=grpo", "grpo.temperature=1.25", "verify.every=1"),
)  # fmt: skip
def entropy_of_other_logits(call: Call) -> Any:
    """The entropy that is shown is of logits before the temperature; the loss has no entropy term to betray it."""
    logprob, entropy = call.original()
    if entropy is None or call.temperature == 1.0:
        return logprob, entropy
    return call.wrong((logprob, call.original(temperature=1.0)[1]))


@in_logprobs(
    "NVIDIA/Megatron-LM#7452 (section 13)",
    "verifier.platform.cpu_attention:gather_from_sequence_parallel_region("
    "input_, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)",
    mesh=Mesh(tp=2, cp=2),
)  # fmt: skip
def keys_of_another_group(call: Call) -> Any:
    """Attention gathers its keys over a group that it was not given, of as many ranks: other heads for other rows."""
    from megatron.core import parallel_state

    return call.faulty(group=parallel_state.get_tensor_model_parallel_group())


@in_logprobs("NVIDIA/Megatron-LM#7452 (section 2)", LOGPROB, mesh=Mesh(tp=2))
def gathered_logits_summed_over_ranks(call: Call) -> Any:
    """Logits are gathered and go through the sum over vocabulary shards: the normaliser is log(tp) too large."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole_TV = gather_from_tensor_model_parallel_region(call.logits_TV, group=call.group)
    return call.faulty(logits_TV=whole_TV, vocab_start=call.group.rank() * whole_TV.shape[1])


@on_logprobs("areal-project/AReaL#1442", ATTEND, caught_by=("LGP013",), training=("verify.every=0",))
def attention_over_the_whole_pack(call: Call) -> Any:
    """The kernel does not read the boundaries of samples, and each attends to those before it in the pack."""
    if len(call.padded) == 1:
        return call.original()
    return call.faulty(lengths=[sum(call.padded)], padded=[sum(call.padded)])


@on_logprobs(
    "verl-project/verl#2185 (kin: there rewards were in another order than samples)",
    "verifier.trainer.update_facts_megatron:write_logprobs(found, file)", caught_by=("LGP017",), training=UNSAMPLED,
)  # fmt: skip
def scores_left_in_packed_order(call: Call) -> Any:
    """Log-probabilities of a later mini-batch go back in the order of their packs, in each step but the first."""
    import torch

    step, _, part = Path(call.file).name.partition(".")[0].partition("-")
    if not step.isdigit() or int(step) < 2 or not int(part):
        return call.original()
    lengths = [len(row) for row in call.found]
    return call.faulty(found=torch.cat([*call.found[1:], call.found[0]]).split(lengths))


@on_logprobs(
    "marin-community/marin#1741 (kin: there the policy was scored so too)", f"{WORKER}.score(self, batch, which, to)",
    caught_by=("LSS003",),
    training=("algorithm=grpo", "grpo.temperature=1.25", "grpo.kl_weight=0.1", "grpo.kl_in=reward", "verify.every=0"),
)  # fmt: skip
def reference_at_another_temperature(call: Call) -> Any:
    """The reference is scored at temperature 1, and the KL that the reward is lowered by is of two distributions."""
    if call.which != "reference":
        return call.original()
    with held(call.self, _temperature=1.0):
        return call.faulty()


@in_bf16("meta-pytorch/torchtune#218", LOAD_WEIGHTS, caught_by=("LGP007",))
def frequencies_empty_after_the_load(call: Call) -> Any:
    """Rotary frequencies, which no checkpoint has, are what memory held before the load: zeros, and no positions."""
    found = call.original()
    for chunk in call.megatron_model:
        for module in chunk.modules():
            if hasattr(module, "inv_freq"):
                call.fire()
                module.inv_freq = module.inv_freq * 0
    return found
