"""A recorded loop's trace before its checks: sealed where it was left open, with the oracle's side if asked."""

from __future__ import annotations

from pathlib import Path

from verifier.core.store import read
from verifier.errors import UsageError
from verifier.probe.sealed import COMMAND, seal


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
