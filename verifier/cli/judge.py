"""A recorded loop's trace, completed before its checks; and runs and traces as a test asserts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verifier
from verifier.config import GoldenConfig, RoundtripConfig
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.errors import UsageError, VerifierError
from verifier.probe.tokens import COMMAND, seal

ORACLE_S = 600.0
"""Seconds that the oracle has for a request."""


def complete_trace(trace: Path, *, oracle: bool, model: Path | None, timeout_s: float) -> None:
    """Seal a trace that is open, and add the oracle's evidence; one of another command stays as it is.

    Raises:
        UsageError: no trace, a damaged one, or nothing that the oracle could compute.
    """
    if model is not None and not oracle:
        raise UsageError("--model is the oracle's: give --oracle with it, or leave it out")
    manifest = read(trace).manifest
    if manifest.command != COMMAND:
        if oracle:
            raise UsageError(
                f"`{trace}` is a trace of `verifier {manifest.command}`, which asks its oracle while it runs"
            )
        return
    if not manifest.complete:
        manifest = seal(trace)
    if not oracle:
        return
    from verifier.probe.loop_oracle import add_oracle, source_of

    source = source_of(trace, model)
    if source is not None:
        from verifier.oracle.oracle import Oracle

        with Oracle(source, timeout_s) as running:
            add_oracle(trace, source, running)


def failure_of_trace(trace: Path, *, oracle: bool = False) -> str:
    """Text of the report of a trace that does not hold; empty for one that does."""
    from verifier.report import render_text

    try:
        complete_trace(trace, oracle=oracle, model=None, timeout_s=ORACLE_S)
        report = verifier.judge(trace)
    except VerifierError as problem:
        return f"`{trace}` was not judged: {problem}"
    return "" if report.verdict is Verdict.HOLDS else render_text(report)


def failure_of_run(command: str, knobs: Sequence[str], trace: Path) -> str:
    """Run `golden` or `roundtrip` with knobs as the command takes them, and say what does not hold."""
    from verifier.config.load import load
    from verifier.runs.runner import Runner, run_once

    kinds: dict[str, tuple[Any, Any]] = {
        "golden": (GoldenConfig, Runner.golden), "roundtrip": (RoundtripConfig, Runner.roundtrip)
    }  # fmt: skip
    kind, run = kinds[command]
    try:
        config, _ = load(kind, overrides=[*knobs, f"trace={trace}"])
        run_once(run, config, print)
    except VerifierError as problem:
        said = failure_of_trace(trace) if (trace / "manifest.json").exists() else ""
        return f"`verifier {command} {' '.join(knobs)}` ended: {problem}" + (f"\n{said}" if said else "")
    return failure_of_trace(trace)
