"""A sweep from its layouts to its summary: each trial has ranks of its own, so its end is a row and no more."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from verifier.campaign.sweep.layouts import SweptLayout, first_budget, layouts_of, longest_of, train_config
from verifier.campaign.sweep.summary import Status, SweepRow, memory_file, next_budget, opened_rows
from verifier.config.sweep import SweepConfig
from verifier.core.outputs import sweep as sweep_work_folders
from verifier.core.outputs import write_whole
from verifier.errors import ContractError, InternalError, UsageError
from verifier.launch.failures import CollectiveTimeout, JobTimeout, LaunchError, RankFailed, StackFailed
from verifier.launch.fork_launcher import ForkLauncher
from verifier.megatron import memory
from verifier.model.named import config_of
from verifier.platform import Tier, select
from verifier.platform.provenance import TRAINER, require_installed
from verifier.report.gate_result import LeftOut
from verifier.report.progress import Progress
from verifier.runs.resources import Deadline

MOST_TOKENS, MOST_TOKENS_UNLIMITED_CPU = 2**20, 8192
"""Greatest budget where --most-tokens is not given; the second without a limit of memory on a CPU, whose host would
run out of memory first."""


_NAME_S = 120.0
"""Seconds until the name of a GPU."""


def device_of(tier: Tier) -> str:
    """Return the name of what the ranks run on, such as "NVIDIA H100 80GB HBM3" or "cpu".

    CUDA says it in a process of its own, whose memory on the GPU is free again before the first trial.

    Raises:
        UsageError: it does not say it.
    """
    if tier == "cpu":
        return "cpu"
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=_NAME_S, check=False)  # noqa: S603 - our own
    if done.returncode:
        raise UsageError(f"the GPU does not answer: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")
    return done.stdout.strip()


def sweep(config: SweepConfig, progress: Progress) -> tuple[list[SweepRow], list[LeftOut], str]:
    """Run every trial that the folder does not hold yet, row by row.

    Returns:
        Rows of the layouts that were asked for, layouts that were not tried, and the device.

    Raises:
        UsageError: what the user can mend, before anything is started.
        InternalError: the process that forks the ranks is gone, or --timeout has passed; the rows so far are kept.
    """
    until = Deadline(config.timeout_s)
    require_installed(*TRAINER)
    sizes, tier = config_of(config.model, config.dtype), select()
    valid, invalid = layouts_of(config, sizes, tier)
    longest = longest_of(config, sizes)
    _require_device(config, valid, tier)
    sweep_work_folders()
    unlimited, device = tier == "cpu" and config.memory_limit is None, device_of(tier)
    most = config.most_tokens or max(config.least_tokens, MOST_TOKENS_UNLIMITED_CPU if unlimited else MOST_TOKENS)
    with opened_rows(config, device) as rows:
        write_whole(config.run / "config.json", json.dumps(sizes, indent=1) + "\n")
        with ForkLauncher(preload="verifier.model.provider_megatron:preload") as launcher:
            trial = partial(_trial, config, launcher, tier, longest)
            for number, layout in enumerate(valid, start=1):
                bounds = {"least": first_budget(config, layout), "most": most, "multiple": layout.multiple}
                while (budget := next_budget(rows.tried(layout.name), **bounds)) is not None:
                    progress(f"layout {number} of {len(valid)}, {layout.name}, {budget:,} tokens")
                    rows.add(trial(layout, budget, until.left(f"the trial of {budget:,} tokens, {layout.name}")))
        names = {layout.name for layout in valid}
        return [row for row in rows.rows if row.layout in names], invalid, device


def _require_device(config: SweepConfig, layouts: list[SweptLayout], tier: Tier) -> None:
    """Refuse ranks that would share a GPU, whose memory is then no rank's own, and a type that the GPU tier lacks."""
    if tier == "cpu":
        return
    import torch

    most, found = max((layout.mesh.world_size for layout in layouts), default=0), torch.cuda.device_count()
    if most > found:
        raise UsageError(f"a layout has {most} ranks and this machine {found} GPUs: a sweep gives each rank its own")
    if config.dtype == "float32":
        raise UsageError("Transformer Engine attends to packed sequences in bf16 only: use --dtype bf16")


def _trial(
    config: SweepConfig,
    launcher: ForkLauncher,
    tier: Tier,
    longest: int,
    layout: SweptLayout,
    budget: int,
    left_s: float,
) -> SweepRow:
    """Take the steps of one trial in ranks of its own; how it ends is its row.

    Raises:
        InternalError: the sweep's deadline passed, or the process that forks the ranks is gone.
    """
    folder = config.run / "trials"
    shutil.rmtree(folder, ignore_errors=True)
    deadline_s = min(config.trial_timeout_s, left_s)
    launcher.wait_ready()
    began, kills, reason = time.monotonic(), memory.kills_of_kernel(), ""
    status: Status = "ok"
    results: list[Mapping[str, Any]] = []
    try:
        results = launcher.run(
            "verifier.campaign.sweep.trial_megatron:run", world_size=layout.mesh.world_size, run_dir=folder,
            args={
                "config": train_config(config, layout, budget).to_dict(), "model": str(config.run.absolute()),
                "tier": tier, "memory_limit": config.memory_limit, "steps": config.steps,
                "micro_batches": config.micro_batches, "longest": longest, "deadline_s": deadline_s,
            },
            deadline_s=deadline_s, collective_deadline_s=deadline_s, mesh=layout.mesh,
        )  # fmt: skip
    except (RankFailed, StackFailed) as problem:
        failed = problem if isinstance(problem, RankFailed) else problem.__cause__
        if not isinstance(failed, RankFailed):  # no rank was started
            raise
        killed = failed.cause == "killed by SIGKILL" and memory.kills_of_kernel() > kills
        exhausted = memory.is_out_of_memory(f"{failed.cause}\n{failed.log_tail}")
        status, reason = "out_of_memory" if killed or exhausted else "failed", _sentence(failed)
    except (JobTimeout, CollectiveTimeout) as late:
        if deadline_s < config.trial_timeout_s:  # the sweep's own end, which is no row
            raise InternalError(f"--timeout is {config.timeout_s:g} s, which passed in a trial") from late
        status, reason = "failed", str(late).splitlines()[0]
    except (LaunchError, UsageError, ContractError) as failed:
        status, reason = "failed", str(failed).splitlines()[0]
    marks = [
        msgspec.json.decode(path.read_bytes(), type=memory.MemoryPeaks)
        for rank in range(layout.mesh.world_size)
        if (path := memory_file(folder, rank)).exists()
    ]
    step_s = statistics.median(results[0]["seconds"]) if results else None
    return SweepRow(
        layout=layout.name, mesh=layout.mesh.to_dict(), recompute=layout.recompute, max_tokens=budget,
        status=status, step_s=step_s, tokens_per_s=results[0]["tokens"] / step_s if step_s else None,
        peak_bytes=max((item.peak for item in marks), default=None),
        reserved_bytes=max((item.reserved for item in marks), default=None), reason=reason,
        trial_s=round(time.monotonic() - began, 3),
    )  # fmt: skip


def _sentence(failed: RankFailed) -> str:
    where = f" ({failed.place})" if failed.place else ""
    return f"rank {failed.rank}{where}: {failed.cause.splitlines()[0][:300]}"
