"""Manifest of the trace of one training step, and the trace of a failure of the stack that ended a run."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from verifier.config.training import TrainConfig
from verifier.core.manifest import Facts, Manifest
from verifier.core.store import complete, create, fail
from verifier.data.second_tokenizer import why_unread
from verifier.launch.failures import StackFailed, record_failure
from verifier.model.families import has_score_bias
from verifier.platform.upstream_fixes import RunFacts
from verifier.probes.training.sampled_step import unsampled_because
from verifier.probes.training.verdicts import Judge, require_held
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.runs.run_manifest import identity_of
from verifier.stages.logprob.probe_spot_scores import has_spot, why_no_spot
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.sampled_batch import LogprobLost

MAX_CUT_BYTES = 2**28
"""Largest checkpoint whose exports a GPU's ranks copy to the host at every sync."""


def can_audit(config: TrainConfig) -> bool:
    """Tell whether masters, moments and gradients of a run are where the audit of its updates looks for them."""
    return not config.megatron.use_fsdp


def has_router_losses(config: TrainConfig) -> bool:
    """Tell whether the routers of a run have losses of their own that a second formula knows."""
    options = config.megatron
    return not config.grpo.replay_routes and bool(options.moe_aux_loss or options.moe_z_loss)


def cuts_exports(config: TrainConfig, tier: str, num_bytes: int) -> bool:
    """Tell whether each rank compares its export with its shards at every sync: on a GPU, of small models alone.

    The comparison copies the checkpoint's `num_bytes` to the host once a sync.
    """
    small = tier == "cpu" or num_bytes <= MAX_CUT_BYTES
    return small and not config.lora.rank and not config.megatron.use_fsdp


def step_manifest(config: TrainConfig, model: ModelUnderTest, happened: Facts) -> Manifest:
    """Identity of the trace of a step.

    Facts of the config and the model are added to what `happened`.
    """
    engine, adapted = config.engine, config.lora.engine_rank(samples=True)
    bugs = RunFacts(
        tier=model.tier, dtype=model.dtype, fixes=tuple(config.fixes), steps=1, lora_rank=config.lora.rank or 0,
        tp=config.mesh.tp, adapter_tp=engine.tp if adapted else 1, engine_ep=engine.ep, sleep_level=engine.sleep_level,
        quantization=engine.quantization, cuda_graphs=engine.replays_graphs(model.tier), training=True,
        balanced=bool(config.megatron.moe_bias_update_rate), further=bool(config.megatron.mtp_loss_scaling_factor),
    )  # fmt: skip
    live = config.algorithm == "grpo" and config.data.rollouts is None
    synced = live and bool(happened.updates)
    engine_bugs = dataclasses.replace(bugs, engine=engine.kind, routes=config.grpo.replay_routes) if live else bugs
    first = happened.sent and happened.step == 1 and not config.lora.rank
    return replace(
        identity_of(config, model, engine_bugs), command="train", notes=model.notes if happened.loaded else (),
        facts=_with_model(config, model, happened),
        engine=config.engine.kind if synced else "",
        engine_ranks=config.engine.ranks * config.engine.replicas if synced else 0,
        synced_versions=(*((happened.step - 1,) if happened.sent else ()), happened.step) if synced else (),
        untouched_versions=(0,) if first and synced else (),
    )  # fmt: skip


def _with_model(config: TrainConfig, model: ModelUnderTest, happened: Facts) -> Facts:
    """Facts of a step, with those of the run's config and its model."""
    sizes, grpo = model.checkpoint.config, config.grpo
    trained = config.algorithm == "grpo"
    live = trained and config.data.rollouts is None
    return replace(
        happened, expert_stages=model.expert_stages, score_bias=has_score_bias(sizes), replicas=model.has_replicas,
        cut=cuts_exports(config, model.tier, model.checkpoint.num_bytes), why_no_layout=model.why_no_layout,
        why_unread=why_unread(model.checkpoint.path),
        why_unsampled=happened.why_unsampled or unsampled_because(config, model),
        why_no_spot=why_no_spot(config, model), spot=has_spot(happened.step), frozen_base=bool(config.lora.rank),
        has_reference=trained and grpo.has_reference, has_turns=trained and grpo.has_turns,
        adapters_sent=bool(config.lora.engine_rank(samples=live)), estimators=(grpo.advantage,) if trained else (),
    )  # fmt: skip


@contextlib.contextmanager
def failure_traced(config: TrainConfig, model: ModelUnderTest, folder: RunFolder, judge: Judge) -> Iterator[None]:
    """Have the failure of the stack that ends what is within judged; a trace of an earlier attempt is removed.

    Raises:
        ViolationFound: the judge's report on it, or on the trace of the step whose answers have no log-probabilities.
    """
    shutil.rmtree(folder.failure_trace, ignore_errors=True)
    try:
        yield
    except StackFailed as problem:
        if isinstance(problem, LogprobLost) and problem.step:
            complete_lost(config, model, folder.trace(problem.step), problem.step)
            require_held(judge, folder.trace(problem.step), f"step {problem.step}")
        require_held(judge, _trace_of(config, model, folder, problem), "the failure")
        raise


def leave_failure(config: TrainConfig, problem: StackFailed) -> None:
    """Leave a trace of the failure that ended a run which nobody judged."""
    folder = RunFolder(config.run)
    shutil.rmtree(folder.failure_trace, ignore_errors=True)
    _trace_of(config, open_model(config.model, config.dtype, config.mesh, config.ray.nodes), folder, problem)


def _trace_of(config: TrainConfig, model: ModelUnderTest, folder: RunFolder, problem: StackFailed) -> Path:
    manifest = step_manifest(config, model, Facts(part="failure"))
    trace = create(folder.failure_trace, manifest)
    facts = replace(manifest.facts, stack_failed=record_failure(trace, problem))
    fail(trace, replace(manifest, facts=facts), str(problem))
    return trace


def complete_lost(config: TrainConfig, model: ModelUnderTest, trace: Path, step: int) -> None:
    """Declare the trace of a step that ended so: its rollouts, and the sync before them if that is in it."""
    sent = (trace / "evidence" / "engine-0000.jsonl").exists()
    manifest = step_manifest(config, model, Facts(part="answers", step=step, sent=sent, updates=(step,)))
    complete(trace, replace(manifest, synced_versions=(step - 1,) if sent else ()))
