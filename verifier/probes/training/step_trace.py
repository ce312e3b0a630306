"""Manifest of the trace of one training step."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from verifier.config.training import TrainConfig
from verifier.core.manifest import Facts, Manifest
from verifier.data.second_tokenizer import why_unread
from verifier.model.families import has_score_bias
from verifier.platform.upstream_fixes import RunFacts
from verifier.probes.training.sampled_step import unsampled_because
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.run_manifest import identity_of
from verifier.stages.logprob.probe_spot_scores import has_spot, why_no_spot

MAX_CUT_BYTES = 2**28
"""Largest checkpoint whose exports a GPU's ranks copy to the host at every sync."""


def can_audit(config: TrainConfig) -> bool:
    """Tell whether masters, moments and gradients of a run are where the audit of its updates looks for them."""
    return not config.megatron.use_fsdp


def has_router_losses(config: TrainConfig) -> bool:
    """Tell whether the routers of a run have losses of their own that a second formula knows."""
    options = config.megatron
    return not config.grpo.replay_routes and bool(options.moe_aux_loss or options.moe_z_loss)


def compares_products(tier: str) -> bool:
    """Tell whether gradients of weights that scale the same numbers are compared (LSS007).

    On GPUs fine-tuning in bf16 is within 0.18 of its bound; neither GRPO nor what it costs a step there was measured.

    Args:
        tier: "cpu" or "cuda".
    """
    return tier == "cpu"


def cuts_exports(config: TrainConfig, tier: str, num_bytes: int) -> bool:
    """Tell whether each rank compares its export with its shards at every sync: on a GPU, of small models alone.

    Args:
        config: of the run.
        tier: "cpu" or "cuda".
        num_bytes: of the checkpoint, which the comparison copies to the host once a sync.
    """
    small = tier == "cpu" or num_bytes <= MAX_CUT_BYTES
    return small and not config.lora.rank and not config.megatron.use_fsdp


def step_manifest(config: TrainConfig, model: ModelUnderTest, happened: Facts) -> Manifest:
    """Identity of the trace of a step.

    Args:
        config: of the run.
        model: of the run.
        happened: what the step was; facts of the config and the model are added.
    """
    bugs = RunFacts(
        tier=model.tier, dtype=model.dtype, fixes=tuple(config.fixes), steps=1, lora_rank=config.lora.rank or 0,
        tp=config.mesh.tp, sleep_level=config.engine.sleep_level, training=True,
        quantization=config.engine.quantization, cuda_graphs=config.engine.replays_graphs(model.tier),
        balanced=bool(config.megatron.moe_bias_update_rate),
    )  # fmt: skip
    live = config.algorithm == "grpo" and config.data.rollouts is None
    synced = live and bool(happened.updates)
    engine_bugs = replace(bugs, engine=config.engine.kind, routes=config.grpo.replay_routes) if live else bugs
    first = happened.sent and happened.step == 1 and not config.lora.rank
    return msgspec.structs.replace(
        identity_of(config, model, engine_bugs), command="train", notes=model.notes if happened.loaded else (),
        facts=_with_model(config, model, happened),
        engine=config.engine.kind if synced else "",
        engine_ranks=config.engine.tp * config.engine.replicas if synced else 0,
        synced_versions=(*((happened.step - 1,) if happened.sent else ()), happened.step) if synced else (),
        untouched_versions=(0,) if first and synced else (),
    )  # fmt: skip


def _with_model(config: TrainConfig, model: ModelUnderTest, happened: Facts) -> Facts:
    """Facts of a step, with those of the run's config and its model."""
    sizes, grpo = model.checkpoint.config, config.grpo
    trained = config.algorithm == "grpo"
    live = trained and config.data.rollouts is None
    return msgspec.structs.replace(
        happened, expert_stages=model.expert_stages, score_bias=has_score_bias(sizes), replicas=model.has_replicas,
        cut=cuts_exports(config, model.tier, model.checkpoint.num_bytes), why_no_layout=model.why_no_layout,
        why_unread=why_unread(model.checkpoint.path), why_unsampled=unsampled_because(config, model),
        why_no_spot=why_no_spot(config, model), spot=has_spot(happened.step), frozen_base=bool(config.lora.rank),
        has_reference=trained and grpo.has_reference, has_turns=trained and grpo.has_turns,
        adapters_sent=bool(config.lora.engine_rank(samples=live)), estimators=(grpo.advantage,) if trained else (),
    )  # fmt: skip
