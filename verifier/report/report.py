"""The report: run identity, outcomes and what was left out. Data only; a pure function of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from verifier.core.check import REGISTRY, Check, run_check
from verifier.core.finding import ExitCode, Outcome, Verdict, verdict_of
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a renderer needs."""

    trace: str
    """Path of the trace as the user would type it."""
    manifest: Manifest = field(default_factory=Manifest)
    outcomes: tuple[Outcome, ...] = ()
    switched_off: tuple[str, ...] = ()
    """Codes of checks that the run's scopes declare and that were not run."""
    out_of_scope: tuple[str, ...] = ()
    """Codes of checks that the run had no subject for."""

    @property
    def verdict(self) -> Verdict:
        """The dominant verdict. A run that did not finish is never more than inconclusive when nothing is violated."""
        found = verdict_of(self.outcomes)
        return found if self.is_complete else max(found, Verdict.INCONCLUSIVE)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command."""
        return self.verdict.exit_code

    @property
    def is_complete(self) -> bool:
        """True if the run finished writing its trace."""
        return self.manifest.complete


def report_of(
    trace: Trace,
    path: str,
    *,
    checks: Mapping[str, Check] = REGISTRY,
    only_codes: Sequence[str] = (),
    only_names: str = "",
) -> Report:
    """Run the checks that a trace's scopes declare and report on them.

    Args:
        trace: live, or read from disk.
        path: where it is stored; printed in the line that tells how to replay.
        checks: by code; the whole registry outside of tests.
        only_codes: run just these, in scope or not; the scoped rest is reported as switched off.
        only_names: keep only comparisons whose subject contains this text.
    """
    scopes = set(trace.manifest.scopes)
    scoped = [item for _, item in sorted(checks.items()) if item.scope in scopes]
    chosen = [item for code, item in sorted(checks.items()) if code in only_codes] if only_codes else scoped
    return Report(
        trace=path,
        manifest=trace.manifest,
        outcomes=tuple(run_check(_restricted(item, only_names), trace) for item in chosen),
        switched_off=tuple(item.code for item in scoped if item not in chosen),
        out_of_scope=tuple(code for code, item in sorted(checks.items()) if item not in scoped and item not in chosen),
    )


def _restricted(item: Check, names: str) -> Check:
    """The same check over the subjects whose name contains a text."""
    return replace(item, fn=lambda trace: (found for found in item.fn(trace) if names in found.what))
