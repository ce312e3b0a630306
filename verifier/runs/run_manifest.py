"""The manifest of a trace: identity of the run, and the checks that have a subject in it."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from verifier.config import GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.core.manifest import Manifest, MeshSizes, Scope
from verifier.errors import Stopped, UsageError, VerifierError
from verifier.knob import flat
from verifier.model.families import num_experts_of
from verifier.platform.pins import PINS, installed
from verifier.platform.stand_ins import stand_ins_of
from verifier.platform.upstream_fixes import RunFacts, bugs_of, refuse_impossible
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.spec import Placement

TOKEN_SCOPES = ("tokens", "replay", "forced", "logprob", "layout", "replicas", "step", "gradient")
"""Scopes of a run of the token path alone, in which nothing is exported."""


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
    sizes, run = model.checkpoint.config, _facts_of(model, config.to_dict())
    refuse_impossible(sizes, run)
    scopes = _scopes(config, model)
    manifest = Manifest(
        command="golden" if isinstance(config, GoldenConfig) else "roundtrip",
        command_line=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        model=config.model,
        dtype=model.dtype,
        mesh=msgspec.convert(model.mesh.to_dict(), MeshSizes),
        world_size=model.mesh.world_size,
        num_gpus=placement.trainer_gpus,
        tier=model.tier,
        versions={name: found for name in PINS if (found := installed(name)) is not None},
        config=config.to_dict(),
        stand_ins=tuple(stand_ins_of(sizes, run)),
        upstream_bugs=tuple(bugs_of(sizes, run)),
        scopes=tuple(scope for scope in scopes if scope in TOKEN_SCOPES or not tokens_only),
    )
    if isinstance(config, GoldenConfig):
        return manifest
    versions = tuple(range(config.cycles + 1))
    return replace(
        manifest, engine=config.engine.kind, engine_ranks=config.engine.tp,
        synced_versions=versions if restores else versions[1:],
        untouched_versions=versions if model.lora_rank else manifest.untouched_versions,
    )  # fmt: skip


def _scopes(config: GoldenConfig | RoundtripConfig, model: ModelUnderTest) -> list[Scope]:
    layout = model.layout_scopes
    saved: list[Scope] = ["saved"] if model.is_saved else []
    gradient: list[Scope] = ["gradient"] if model.judges_gradients else []
    if isinstance(config, GoldenConfig):
        return ["export", *layout, *saved]
    scopes: list[Scope] = ["tokens", "export", "held", "cold", "settings", "logprob", "rollout"]
    if model.lora_rank:
        return [*scopes, *layout, "update", "adapter", *gradient] if layout else scopes
    scopes += ["plan", "transport", "engine", *saved]
    if num_experts_of(model.checkpoint.config):
        scopes += ["replay", "forced"] if layout else ["replay"]
    if layout:
        scopes += [*layout, "update"]
    return [*scopes, "step", *gradient] if config.update == "step" else scopes


def _facts_of(model: ModelUnderTest, config: Mapping[str, Any]) -> RunFacts:
    """Facts that decide which upstream bugs reach a run, from its configuration as the manifest records it."""
    knobs = flat(config)
    return RunFacts(
        tier=model.tier, dtype=model.dtype, engine=knobs.get("engine.kind", ""),
        quantization=knobs.get("engine.quantization"), cuda_graphs=knobs.get("engine.cuda_graphs", False),
        sleep_level=knobs.get("engine.sleep_level", 0),
        steps=knobs["cycles"] if knobs.get("update") == "step" else 0, fixes=tuple(knobs["fixes"]),
    )  # fmt: skip


@contextlib.contextmanager
def recording(traces: Sequence[Path], manifest: Manifest) -> Iterator[Callable[[Path], None]]:
    """Make trace directories, which are absent or empty, with this manifest; yields what marks one as complete.

    A usage error removes those that are not complete, any other error marks them.
    """
    incomplete: list[Path] = []

    def complete(trace: Path) -> None:
        store.complete(trace, manifest)
        incomplete.remove(trace)

    try:
        for trace in traces:
            incomplete.append(store.create(trace, manifest))
        yield complete
    except UsageError:
        for trace in incomplete:
            store.discard(trace)
        raise
    except (VerifierError, Stopped) as problem:
        for trace in incomplete:
            store.fail(trace, manifest, str(problem))
        raise
