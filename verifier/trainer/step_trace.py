"""Manifest of the trace of one training step."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

import msgspec

from verifier.config.training import TrainConfig
from verifier.core.manifest import Manifest, MeshSizes, Scope
from verifier.platform.pins import PINS, installed
from verifier.platform.stand_ins import stand_ins_of
from verifier.platform.upstream_fixes import RunFacts, bugs_of
from verifier.runs.model_under_test import ModelUnderTest


def step_manifest(config: TrainConfig, model: ModelUnderTest, *, resumed: bool = False) -> Manifest:
    """Identity of a step's trace, the first after a resume or another; which step it is, its records say."""
    sizes = model.checkpoint.config
    facts = RunFacts(tier=model.tier, dtype=model.dtype, fixes=tuple(config.fixes), steps=1)
    scopes: list[Scope] = ["data", "batch", "schedule", "tokens"]
    if config.algorithm == "grpo":
        scopes = ["batch", "schedule", "tokens", "policy", "reward"]
    if "replicas" in model.layout_scopes:
        scopes.append("replicas")
    if resumed:
        scopes.append("resume")
    return Manifest(
        command="train", command_line=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors", model=config.model,
        dtype=model.dtype, mesh=msgspec.convert(model.mesh.to_dict(), MeshSizes), world_size=model.mesh.world_size,
        tier=model.tier, versions={name: found for name in PINS if (found := installed(name)) is not None},
        config=config.to_dict(), stand_ins=tuple(stand_ins_of(sizes, facts)),
        upstream_bugs=tuple(bugs_of(sizes, facts)), scopes=tuple(scopes),
    )  # fmt: skip
