"""Bugs of the rollout: right weights, and wrong log-probabilities with the tokens that they score or sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced

SAMPLER = "vllm.v1.sample.sampler:Sampler"
TEMPERATURE = 0.6
"""Of the report that the fault re-enacts."""


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
def _other_temperature(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def compute_logprobs(logits: Any) -> Any:
            fired()
            return original(logits / TEMPERATURE)

        return compute_logprobs

    with replaced(f"{SAMPLER}.compute_logprobs", "logits", make):
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
def _sampled_at_another_temperature(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def apply_temperature(logits: Any, temp: Any, all_random: bool) -> Any:
            fired()
            return original(logits, temp * TEMPERATURE, all_random)

        return apply_temperature

    with replaced(f"{SAMPLER}.apply_temperature", "logits, temp, all_random", make):
        yield


FAULTS = (
    Fault(
        id="sampler-takes-the-models-defaults",
        stage=Stage.ROLLOUT,
        reproduces="verl-project/verl#1949",
        summary="the server samples with a setting of the model's generation_config; the log-probabilities are right",
        caught_by=("LGP004",),
        inject=_sampled_at_another_temperature,
        side=Side.ENGINE,
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
        id="logprobs-at-other-temperature",
        stage=Stage.ROLLOUT,
        reproduces="huggingface/trl#4159",
        summary="the engine reports log-probabilities at another temperature than the trainer computes them",
        caught_by=("LGP002", "LGP003"),
        inject=_other_temperature,
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
