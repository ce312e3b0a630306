"""What a run's manifest says of stand-ins, fixes and known upstream bugs, and which bug explains a finding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verifier.core.finding import Outcome

Bug = Mapping[str, Any]


def stack_lines(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line on what replaced upstream code; none for a trace that does not say."""
    lines = []
    if stand_ins := manifest.get("stand_ins"):
        lines.append(("stands in", ", ".join(stand_ins)))
    if "upstream_bugs" in manifest:
        lines.append(_fixes(manifest["upstream_bugs"]))
    return lines


def _fixes(bugs: Sequence[Bug]) -> tuple[str, str]:
    on = [bug["id"] for bug in bugs if bug["fixed"]]
    left = ", ".join(bug["issue"] for bug in bugs if not bug["fixed"])
    if on:
        return "fixes on", ", ".join(on) + (f"; not fixed: {left}" if left else "")
    return "as shipped; known upstream bugs that apply", left or "none"


def explanation(outcome: Outcome, manifest: Mapping[str, Any]) -> str:
    """The bugs that are not fixed, violate this check, and reach all that it found between them; empty if none do."""
    if outcome.finding is None:
        return ""
    names = {item.what for item in outcome.finding.bad or (outcome.finding.first,)}
    bugs = [bug for bug in manifest.get("upstream_bugs", ()) if not bug["fixed"] and outcome.code in bug["checks"]]
    reached = {bug["id"]: {name for name in names if re.fullmatch(bug["names"], name)} for bug in bugs}
    if names - set().union(*reached.values()):
        return ""
    return _advice([bug for bug in bugs if reached[bug["id"]]])


def why_it_ended(manifest: Mapping[str, Any]) -> str:
    """The bug, if any, that is not fixed and ends a run as this one ended."""
    failure = str(manifest.get("failure", ""))
    for bug in manifest.get("upstream_bugs", ()):
        if not bug["fixed"] and not bug["checks"] and re.search(bug["names"], failure):
            return _advice([bug])
    return ""


def _advice(bugs: Sequence[Bug]) -> str:
    issues, options = ", ".join(bug["issue"] for bug in bugs), " --fix ".join(bug["id"] for bug in bugs)
    return f"{issues}; run again with `--fix {options}` to see what is left"
