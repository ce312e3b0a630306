"""Bugs of the rollout: right weights, and wrong log-probabilities with the tokens that they score or sample."""

from __future__ import annotations

import dataclasses
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FireCounter, Side, fault

SAMPLER = "vllm.v1.sample.sampler:Sampler"
FORWARD = f"{SAMPLER}.forward(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)"
CLIENT = "verifier.engine.client:EngineClient"
GENERATE = f"{CLIENT}.generate(self, prompts, sampling)"
PENALTY = 1.05
"""Repetition penalty in the published generation_config of Qwen2.5, the report's model."""
NUCLEUS = 0.95
"""Top-p in the published generation_config of many models."""
ROW: dict[str, Any] = {"stage": Stage.ROLLOUT, "engine": "vllm"}
WORKER: dict[str, Any] = {**ROW, "side": Side.ENGINE}


@fault(GENERATE, id="seeds-counted-per-request", reproduces="modelscope/ms-swift#7858", caught_by=("LGP005",), **ROW)
def seeds_counted_per_request(original: Any, fire: FireCounter, self: Any, prompts: Any, sampling: Any) -> Any:
    """A request's seed is its place in its own chunk, so requests of different chunks repeat each other."""
    fire()
    return [found for prompt in prompts for found in original(self, [prompt], sampling)]


@fault(
    "vllm.v1.worker.block_table:BlockTable.move_row(self, src, tgt)",
    id="block-of-the-row-before", reproduces="vllm-project/vllm#39591", caught_by=("LGP003",), **WORKER,
)  # fmt: skip
def block_of_the_row_before(original: Any, fire: FireCounter, self: Any, src: int, tgt: int) -> None:
    """A request moves into the row of one that has ended, where the last block is still the other's."""
    fire()
    last = self.num_blocks_per_row[src] - 1
    held = self.block_table.np[tgt, last]
    original(self, src, tgt)
    self.block_table.np[tgt, last] = held


@fault(GENERATE, id="first-stop-token-only", reproduces="NovaSky-AI/SkyRL#1319", caught_by=("LGP006",), **ROW)
def first_stop_token_only(original: Any, fire: FireCounter, self: Any, prompts: Any, sampling: Any) -> Any:
    """Only the first of several stop tokens ends an answer, and samples run on past the others."""
    if len(sampling.stop) > 1:
        fire()
    return original(self, prompts, dataclasses.replace(sampling, stop=sampling.stop[:1]))


@fault(
    f"{SAMPLER}.sample(self, logits, sampling_metadata, logprobs_mode_override)",
    id="sampler-takes-the-models-nucleus", reproduces="NVIDIA-NeMo/RL#3497", caught_by=("LGP004",), **WORKER,
)  # fmt: skip
def sampler_takes_the_models_nucleus(
    original: Any, fire: FireCounter, self: Any, logits: Any, metadata: Any, *rest: Any
) -> Any:
    """Values that a request leaves unset come from the model's generation_config: a top-p of 0.95."""
    import torch

    fire()
    nucleus = torch.full((len(logits),), NUCLEUS, device=logits.device)
    return original(self, logits, dataclasses.replace(metadata, top_p=nucleus), *rest)


@fault(
    "verifier.engine.vllm.engine_vllm:_params(sampling)",
    id="sampler-takes-the-models-defaults", reproduces="verl-project/verl#1949", caught_by=("LGP003",),
    side=Side.DRIVER, **ROW,
)  # fmt: skip
def sampler_takes_the_models_defaults(original: Any, fire: FireCounter, sampling: Any) -> Any:
    """The server applies a setting of the model's generation_config: a repetition penalty of 1.05."""
    found = original(sampling)
    if found.repetition_penalty == 1:  # left unset
        found.repetition_penalty = PENALTY
        fire()
    return found


@fault(
    f"{CLIENT}.reset_prefix_cache(self)",
    id="prefix-cache-outlives-weights", reproduces="NVIDIA-NeMo/RL#4018", caught_by=("LGP003",), **ROW,
)  # fmt: skip
def prefix_cache_outlives_weights(original: Any, fire: FireCounter, self: Any) -> bool:
    """Nothing resets the prefix cache after a sync, so known prompts are read with the old weights' keys."""
    fire()
    return True


@fault(
    f"{SAMPLER}.apply_temperature(logits, temp, all_random)",
    id="sampling-temperature-ignored", reproduces="vllm-project/vllm#15241", caught_by=("LGP003", "LGP004"), **WORKER,
)  # fmt: skip
def sampling_temperature_ignored(original: Any, fire: FireCounter, logits: Any, temp: Any, all_random: bool) -> Any:
    """Tokens are sampled at temperature 1, whatever is asked for."""
    if (temp != 1).any():
        fire()
    return original(logits, temp * 0 + 1, all_random)


@fault(FORWARD, id="logprobs-before-temperature", reproduces="huggingface/trl#4159", caught_by=("LGP003",), **WORKER)
def logprobs_before_temperature(original: Any, fire: FireCounter, self: Any, *args: Any, **options: Any) -> Any:
    """An engine's default changed: log-probabilities are those of the logits before the temperature."""
    fire()
    self.logprobs_mode = self.topk_topp_sampler.logprobs_mode = "raw_logprobs"
    try:
        return original(self, *args, **options)
    finally:
        self.logprobs_mode = self.topk_topp_sampler.logprobs_mode = "processed_logprobs"


@fault(FORWARD, id="most-likely-token-reported", reproduces="NVIDIA-NeMo/RL#3297", caught_by=("LGP003",), **WORKER)
def most_likely_token_reported(
    original: Any, fire: FireCounter, self: Any, logits: Any, *args: Any, **options: Any
) -> Any:
    """The log-probability of the most likely token stands where the sampled token's belongs."""
    greatest = self.compute_logprobs(logits).max(dim=-1).values
    output = original(self, logits, *args, **options)
    if output.logprobs_tensors is not None:
        output.logprobs_tensors.logprobs[:, 0] = greatest
        fire()
    return output


@fault(
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts("
    "hidden_states, router_logits, top_k, use_grouped_topk, renormalize, topk_group, num_expert_group, "
    "custom_routing_function, scoring_func, routed_scaling_factor, e_score_correction_bias)",
    id="router-weights-not-normalised", reproduces="HabanaAI/vllm-fork#73", caught_by=("LGP002", "LGP003"), **WORKER,
)  # fmt: skip
def router_weights_not_normalised(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """The engine's kernel does not bring the chosen experts' weights to a sum of one."""
    fire()
    return original(*args, **{**options, "renormalize": False})
