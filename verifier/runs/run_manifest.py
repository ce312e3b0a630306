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
from verifier.runs.placement import Placement, place_trainer

TOKEN_SCOPES = ("tokens", "replay", "forced", "logprob", "layout", "replicas", "step", "gradient")
"""Scopes of a run of the token path alone, in which nothing is exported."""


def golden_manifest(config: GoldenConfig, model: ModelUnderTest) -> Manifest:
    """Manifest of `verifier golden`."""
    scopes: list[Scope] = ["export", *model.layout_scopes]
    if model.is_saved:
        scopes.append("saved")
    return replace(_identity(model, "golden", config, place_trainer(config.mesh, model.tier)), scopes=tuple(scopes))


def roundtrip_manifest(
    config: RoundtripConfig, model: ModelUnderTest, placement: Placement, *, restores: bool, tokens_only: bool
) -> Manifest:
    """Manifest of `verifier roundtrip`.

    Args:
        config: of the run.
        model: of the run.
        placement: of the run.
        restores: version 0 is sent too, to bring a used engine back.
        tokens_only: nothing is exported and no engine takes part.
    """
    scopes = _scopes(config, model)
    manifest = replace(
        _identity(model, "roundtrip", config, placement.trainer_gpus),
        scopes=tuple(scope for scope in scopes if scope in TOKEN_SCOPES or not tokens_only),
        engine=config.engine.kind,
        engine_ranks=config.engine.tp,
        synced_versions=tuple(range(0 if restores else 1, config.cycles + 1)),
    )
    if config.engine.lora_rank:
        return replace(manifest, untouched_versions=tuple(range(config.cycles + 1)))
    return manifest


def judges_gradients(config: RoundtripConfig, model: ModelUnderTest) -> bool:
    """True if gradients and steps have an oracle; an adapter's only in fp32, where there is no noise to measure."""
    return model.judges_gradients and (not config.engine.lora_rank or config.dtype == "float32")


def _scopes(config: RoundtripConfig, model: ModelUnderTest) -> list[Scope]:
    scopes: list[Scope] = ["tokens", "export", "held", "cold", "settings", "logprob", "rollout"]
    layout = model.layout_scopes
    gradient: list[Scope] = ["gradient"] if judges_gradients(config, model) else []
    if config.engine.lora_rank:
        return [*scopes, *layout, "update", "adapter", *gradient] if layout else scopes
    scopes += ["plan", "transport", "engine"]
    if model.is_saved:
        scopes.append("saved")
    if num_experts_of(model.checkpoint.config):
        scopes += ["replay", "forced"] if layout else ["replay"]
    if layout:
        scopes += [*layout, "update"]
    return [*scopes, "step", *gradient] if config.update == "step" else scopes


def _identity(model: ModelUnderTest, command: str, config: GoldenConfig | RoundtripConfig, num_gpus: int) -> Manifest:
    """Identity of a run, and what was replaced upstream.

    Raises:
        UsageError: an upstream bug would end the run, and its fix is not asked for.
    """
    sizes, run = model.checkpoint.config, _facts_of(model, config.to_dict())
    refuse_impossible(sizes, run)
    sizes_of_mesh: dict[str, Any] = model.mesh.to_dict()
    return Manifest(
        command=command,
        command_line=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        host=f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        model=config.model,
        dtype=model.dtype,
        mesh=MeshSizes(**sizes_of_mesh),
        world_size=model.mesh.world_size,
        num_gpus=num_gpus,
        tier=model.tier,
        versions={name: found for name in PINS if (found := installed(name)) is not None},
        config=dict(config.to_dict()),
        stand_ins=tuple(stand_ins_of(sizes, run)),
        upstream_bugs=tuple(bugs_of(sizes, run)),
    )


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
    """Make trace directories; a usage error removes those that are not complete, any other error marks them.

    Args:
        traces: directories that must not exist or be empty.
        manifest: of each of them.

    Yields:
        What marks one of them as complete.
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
