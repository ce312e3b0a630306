"""Stand-ins, fixes and known upstream bugs in a run's manifest, and the bug that explains a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verifier.core.finding import Outcome
from verifier.core.manifest import Manifest, UpstreamBug


def stack_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Name and value of each line on what replaced upstream code; none for a trace that does not say."""
    lines = [("stands in", ", ".join(manifest.stand_ins))] if manifest.stand_ins else []
    if manifest.upstream_bugs is not None:
        on = ", ".join(bug.id for bug in manifest.upstream_bugs if bug.fixed)
        left = ", ".join(bug.issue for bug in manifest.upstream_bugs if not bug.fixed)
        if on:
            lines.append(("fixes on", on + (f"; not fixed: {left}" if left else "")))
        else:
            lines.append(("as shipped; known upstream bugs that apply", left or "none"))
    return lines


def explanation(outcome: Outcome, manifest: Manifest) -> str:
    """The bugs that are not fixed, violate this check, and reach all that it found between them; empty if none do."""
    if outcome.finding is None:
        return ""
    names = {item.what for item in outcome.finding.bad or (outcome.finding.first,)}
    bugs = [bug for bug in manifest.upstream_bugs or () if not bug.fixed and outcome.code in bug.checks]
    reached = {bug.id: {name for name in names if re.fullmatch(bug.names, name)} for bug in bugs}
    if names - set().union(*reached.values()):
        return ""
    return _advice([bug for bug in bugs if reached[bug.id]])


def why_it_ended(manifest: Manifest) -> str:
    """The bug, if any, that is not fixed and ends a run as this one ended."""
    for bug in manifest.upstream_bugs or ():
        if not bug.fixed and not bug.checks and re.search(bug.names, manifest.failure):
            return _advice([bug])
    return ""


def _advice(bugs: Sequence[UpstreamBug]) -> str:
    issues, options = ", ".join(bug.issue for bug in bugs), " --fix ".join(bug.id for bug in bugs)
    return f"{issues}; run again with `--fix {options}` to see what is left"
