"""`verifier bisect` from its config to its trace: trainer and transformers on one step, module by module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from verifier.config import BisectConfig, EngineOptions, RoundtripConfig
from verifier.core.stage import Stage, in_stage
from verifier.core.store import recording, require_room
from verifier.core.work_folder import work_folder
from verifier.errors import UsageError
from verifier.launch.child import end_of
from verifier.oracle.activations import record_activations
from verifier.runs.derived_layout import with_layout
from verifier.runs.ended import record_failure
from verifier.runs.model_under_test import open_for_roundtrip
from verifier.runs.resources import Deadline, Resources
from verifier.runs.run_manifest import manifest_of
from verifier.runs.scenario import made_up
from verifier.runs.spec import place, run_spec
from verifier.runs.workload import Workload, expected_rollouts


def bisect(
    config: BisectConfig, resources: Resources, progress: Callable[[str], None], within: Sequence[str] = ()
) -> Path:
    """Record what every module of trainer and oracle puts out, forward and backward, for one batch; returns the trace.

    Args:
        config: model, mesh, seed.
        resources: launcher and oracle.
        progress: called with a line of text for each step.
        within: context manager around each rank's passes; see `RunSpec.within`.

    Raises:
        UsageError: the model or the mesh cannot be run here; nothing was run.
        VerifierError: a process died or hung; the trace says so.
    """
    until = Deadline(config.timeout_s)
    asked = RoundtripConfig(
        model=config.model, trace=config.trace, mesh=config.mesh, dtype=config.dtype, engine=EngineOptions(kind="hf"),
        cycles=1, fixes=config.fixes, seed=config.seed, timeout_s=config.timeout_s,
    )  # fmt: skip
    require_room(config.trace)
    model = open_for_roundtrip(asked)
    if model.tier != "cpu":
        raise UsageError("bisect compares in fp32, which Transformer Engine does not attend in: run it on a CPU")
    placement = place(asked, model.tier)
    model = with_layout(model, asked, placement, resources, until, progress, tuple(within))
    manifest = replace(
        manifest_of(asked, model, placement, tokens_only=True), command="bisect", config=config.to_dict(),
        synced_versions=(), engine="", engine_ranks=0,
    )  # fmt: skip
    workload = made_up(asked, model.checkpoint.config)
    with work_folder("bisect") as work:
        logs = work / "ranks"

        def ends() -> dict[str, bytes]:
            return {file.stem: end_of(file) for file in sorted(logs.glob("*.log"))}

        with recording([config.trace], manifest, ends, record_failure) as complete:
            resources.oracle(model.checkpoint.path, until)  # it starts while Megatron is imported
            spec = run_spec(
                asked, model, placement, workload=workload, trace=str(config.trace), work=str(work),
                within=tuple(within), deadline_s=resources.collective_deadline_s,
            )  # fmt: skip
            with in_stage(Stage.LOAD):
                resources.launcher(until).run(
                    "verifier.runs.bisect_megatron:run", world_size=config.mesh.world_size, run_dir=logs,
                    args={"session": spec.to_json()}, deadline_s=until.left("the ranks were started"),
                    collective_deadline_s=spec.deadline_s, mesh=config.mesh, num_gpus=0,
                    on_progress=lambda rank, text: progress(text),
                )  # fmt: skip
            resources.release(None)
            progress("the same by transformers in fp32")
            oracle = resources.oracle(model.checkpoint.path, until)
            with in_stage(Stage.LOGPROB):
                record_activations(
                    oracle, config.trace, work, model.checkpoint, _batch(workload), _rule(workload), model.layout,
                    config.mesh,
                )  # fmt: skip
            complete(config.trace)
    return config.trace


def _batch(workload: Workload) -> list[list[Any]]:
    """The first batch as the oracle takes it, by none of the trainer's code."""
    return [
        [item.tokens.tolist(), item.mask.tolist(), float(item.reward), np.nan_to_num(item.logprobs).tolist()]
        for item in expected_rollouts(workload.batches[0])
    ]


def _rule(workload: Workload) -> dict[str, float]:
    fields = msgspec.to_builtins(workload.objective)
    return {key: float(fields[key]) for key in ("temperature", "entropy_weight", "drift_weight")}
