"""The manifest of a trace: identity of the run, and the checks that have a subject in it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from functools import cache
from typing import Any

import msgspec
from msgspec.structs import replace

from verifier.config import GoldenConfig, RoundtripConfig, TrainConfig
from verifier.contracts.examine import declared
from verifier.core.manifest import Facts, Manifest, MeshSizes
from verifier.platform import Tier
from verifier.platform.provenance import origin_of
from verifier.platform.stand_ins import stand_ins_of
from verifier.platform.upstream_fixes import RunFacts, bugs_of, refuse_impossible
from verifier.runs.model_under_test import ModelUnderTest, cache_folder
from verifier.runs.spec import Placement


def identity_of(config: GoldenConfig | RoundtripConfig | TrainConfig, model: ModelUnderTest, run: RunFacts) -> Manifest:
    """Manifest of a run of a command, with what the process, the machine, the config and the model say."""
    sizes = model.checkpoint.config
    return Manifest(
        **origin_of(shlex.join(["verifier", *sys.argv[1:]]), model.tier),
        **_looked_at(model.tier),
        model=config.model,
        dtype=model.dtype,
        mesh=msgspec.convert(model.mesh.to_dict(), MeshSizes),
        world_size=model.mesh.world_size,
        config=config.to_dict(),
        layout=model.layout_kind,
        stand_ins=tuple(stand_ins_of(sizes, run)),
        upstream_bugs=tuple(bugs_of(sizes, run)),
    )


@cache
def _looked_at(tier: Tier) -> dict[str, Any]:
    """Fields of a manifest on the contracts of the versions that run, which stay while the run does."""
    return declared(tier, cache_folder() / "contracts")


def manifest_of(
    config: GoldenConfig | RoundtripConfig,
    model: ModelUnderTest,
    placement: Placement,
    *,
    restores: bool = False,
    tokens_only: bool = False,
) -> Manifest:
    """Manifest of a run; if it `restores`, version 0 is sent too; if `tokens_only`, nothing is, and there is no engine.

    Raises:
        UsageError: an upstream bug would end the run, and its fix is not asked for.
    """
    run = _facts_of(model, config)
    refuse_impossible(model.checkpoint.config, run)
    manifest = replace(
        identity_of(config, model, run),
        command="golden" if isinstance(config, GoldenConfig) else "roundtrip",
        num_gpus=placement.trainer_gpus,
        facts=Facts(
            expert_stages=model.expert_stages,
            frozen_base=bool(model.lora_rank),
            replicas=model.has_replicas,
            saved=model.is_saved,
            judges_gradients=model.judges_cycles,
            why_no_layout=model.why_no_layout,
        ),
    )
    if isinstance(config, GoldenConfig):
        return manifest
    versions = tuple(range(config.cycles + 1))
    return replace(
        manifest, engine=config.engine.kind, engine_ranks=config.engine.ranks,
        transport="" if tokens_only else placement.transport,
        synced_versions=() if tokens_only else versions if restores else versions[1:],
        untouched_versions=versions if model.lora_rank else manifest.untouched_versions,
    )  # fmt: skip


def _facts_of(model: ModelUnderTest, config: GoldenConfig | RoundtripConfig) -> RunFacts:
    shared = RunFacts(tier=model.tier, dtype=model.dtype, fixes=tuple(config.fixes))
    if isinstance(config, GoldenConfig):
        return shared
    engine = config.engine
    return dataclasses.replace(
        shared, lora_rank=engine.lora_rank, tp=model.mesh.tp, engine=engine.kind, quantization=engine.quantization,
        adapter_tp=engine.tp if engine.lora_rank else 1, engine_ep=engine.ep, sleep_level=engine.sleep_level,
        cuda_graphs=bool(engine.cuda_graphs), steps=config.cycles if config.update == "step" else 0,
    )  # fmt: skip
