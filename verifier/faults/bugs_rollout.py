"""Bugs of the rollout: right weights, and wrong log-probabilities with the tokens that they score or sample."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced

SAMPLER = "vllm.v1.sample.sampler:Sampler"
PENALTY = 1.05
"""Of repeated tokens; of the published generation_config of Qwen2.5, the report's model."""
NUCLEUS = 0.95
"""Of the published generation_config of many models."""


@contextlib.contextmanager
def _prefixes_kept(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def reset_prefix_cache(self: Any) -> bool:
            fired()
            return True

        return reset_prefix_cache

    with replaced("verifier.engine.client:EngineClient.reset_prefix_cache", "self", make):
        yield


@contextlib.contextmanager
def _most_likely_reported(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def forward(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
            greatest = self.compute_logprobs(logits).max(dim=-1).values
            output = original(self, logits, *args, **kwargs)
            if output.logprobs_tensors is not None:
                output.logprobs_tensors.logprobs[:, 0] = greatest
                fired()
            return output

        return forward

    with replaced(
        f"{SAMPLER}.forward", "self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override", make
    ):
        yield


@contextlib.contextmanager
def _not_normalised(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def select_experts(*args: Any, **kwargs: Any) -> Any:
            fired()
            return original(*args, **{**kwargs, "renormalize": False})

        return select_experts

    with replaced(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts",
        "hidden_states, router_logits, top_k, use_grouped_topk, renormalize, topk_group, num_expert_group, "
        "custom_routing_function, scoring_func, routed_scaling_factor, e_score_correction_bias",
        make,
    ):
        yield


@contextlib.contextmanager
def _penalty_of_the_model(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def params(sampling: Any) -> Any:
            found = original(sampling)
            if found.repetition_penalty == 1:  # left unset
                found.repetition_penalty = PENALTY
                fired()
            return found

        return params

    with replaced("verifier.engine.vllm.engine_vllm:_params", "sampling", make):
        yield


@contextlib.contextmanager
def _temperature_ignored(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def apply_temperature(logits: Any, temp: Any, all_random: bool) -> Any:
            if (temp != 1).any():
                fired()
            return original(logits, temp * 0 + 1, all_random)

        return apply_temperature

    with replaced(f"{SAMPLER}.apply_temperature", "logits, temp, all_random", make):
        yield


@contextlib.contextmanager
def _raw_logprobs(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            self.logprobs_mode = self.topk_topp_sampler.logprobs_mode = "raw_logprobs"
            try:
                return original(self, *args, **kwargs)
            finally:
                self.logprobs_mode = self.topk_topp_sampler.logprobs_mode = "processed_logprobs"

        return forward

    with replaced(
        f"{SAMPLER}.forward", "self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override", make
    ):
        yield


@contextlib.contextmanager
def _nucleus_of_the_model(fired: Fired) -> Iterator[None]:
    import torch

    def make(original: Any) -> Any:
        def sample(self: Any, logits: Any, metadata: Any, *rest: Any) -> Any:
            fired()
            nucleus = torch.full((len(logits),), NUCLEUS, device=logits.device)
            return original(self, logits, dataclasses.replace(metadata, top_p=nucleus), *rest)

        return sample

    with replaced(f"{SAMPLER}.sample", "self, logits, sampling_metadata, logprobs_mode_override", make):
        yield


@contextlib.contextmanager
def _last_block_not_moved(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def move_row(self: Any, src: int, tgt: int) -> None:
            fired()
            last = self.num_blocks_per_row[src] - 1
            held = self.block_table.np[tgt, last]
            original(self, src, tgt)
            self.block_table.np[tgt, last] = held

        return move_row

    with replaced("vllm.v1.worker.block_table:BlockTable.move_row", "self, src, tgt", make):
        yield


@contextlib.contextmanager
def _one_stop_token(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def generate(self: Any, prompts: Any, sampling: Any, **options: Any) -> Any:
            if len(sampling.stop) > 1:
                fired()
            return original(self, prompts, dataclasses.replace(sampling, stop=sampling.stop[:1]), **options)

        return generate

    with replaced("verifier.engine.client:EngineClient.generate", "self, prompts, sampling, deadline_s", make):
        yield


@contextlib.contextmanager
def _seeds_counted_per_request(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def generate(self: Any, prompts: Any, sampling: Any, **options: Any) -> Any:
            fired()
            return [found for prompt in prompts for found in original(self, [prompt], sampling, **options)]

        return generate

    with replaced("verifier.engine.client:EngineClient.generate", "self, prompts, sampling, deadline_s", make):
        yield


FAULTS = (
    Fault(
        id="seeds-counted-per-request",
        stage=Stage.ROLLOUT,
        reproduces="modelscope/ms-swift#7858",
        summary="a request's seed is its place in its own chunk, so requests of different chunks repeat each other",
        caught_by=("LGP005",),
        inject=_seeds_counted_per_request,
        engine="vllm",
    ),
    Fault(
        id="block-of-the-row-before",
        stage=Stage.ROLLOUT,
        reproduces="vllm-project/vllm#39591",
        summary="a request moves into the row of one that has ended, where the last block is still the other's",
        caught_by=("LGP003",),
        inject=_last_block_not_moved,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="first-stop-token-only",
        stage=Stage.ROLLOUT,
        reproduces="NovaSky-AI/SkyRL#1319",
        summary="of several tokens that end an answer only the first is heeded, and samples run on past the others",
        caught_by=("LGP006",),
        inject=_one_stop_token,
        engine="vllm",
    ),
    Fault(
        id="sampler-takes-the-models-nucleus",
        stage=Stage.ROLLOUT,
        reproduces="NVIDIA-NeMo/RL#3497",
        summary="what a request leaves unset comes from the model's generation_config: a top-p of 0.95",
        caught_by=("LGP004",),
        inject=_nucleus_of_the_model,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="sampler-takes-the-models-defaults",
        stage=Stage.ROLLOUT,
        reproduces="verl-project/verl#1949",
        summary="the server applies a setting of the model's generation_config: a repetition penalty of 1.05",
        caught_by=("LGP003",),
        inject=_penalty_of_the_model,
        side=Side.DRIVER,
        engine="vllm",
    ),
    Fault(
        id="prefix-cache-outlives-weights",
        stage=Stage.ROLLOUT,
        reproduces="NVIDIA-NeMo/RL#4018",
        summary="nobody resets the prefix cache after a sync, so known prompts are read with the old weights' keys",
        caught_by=("LGP003",),
        inject=_prefixes_kept,
        engine="vllm",
    ),
    Fault(
        id="sampling-temperature-ignored",
        stage=Stage.ROLLOUT,
        reproduces="vllm-project/vllm#15241",
        summary="whatever temperature is asked for, tokens are sampled at 1",
        caught_by=("LGP003", "LGP004"),
        inject=_temperature_ignored,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="logprobs-before-temperature",
        stage=Stage.ROLLOUT,
        reproduces="huggingface/trl#4159",
        summary="an engine's default changed: log-probabilities are those of the logits before the temperature",
        caught_by=("LGP003",),
        inject=_raw_logprobs,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="most-likely-token-reported",
        stage=Stage.ROLLOUT,
        reproduces="NVIDIA-NeMo/RL#3297",
        summary="the log-probability of the most likely token stands where the sampled token's belongs",
        caught_by=("LGP003",),
        inject=_most_likely_reported,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="router-weights-not-normalised",
        stage=Stage.ROLLOUT,
        reproduces="HabanaAI/vllm-fork#73",
        summary="the engine's kernel does not bring the chosen experts' weights to a sum of one",
        caught_by=("LGP002", "LGP003"),
        inject=_not_normalised,
        side=Side.ENGINE,
        engine="vllm",
    ),
)
