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
        lines.append(("stands in", "; ".join(stand_ins)))
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
    """The bug, if any, that is not fixed, violates this check, and reaches all that the check found."""
    if outcome.finding is None:
        return ""
    named = {item.what for item in outcome.finding.bad or (outcome.finding.first,)}
    for bug in manifest.get("upstream_bugs", ()):
        explained = all(re.fullmatch(bug["names"], name) for name in named)
        if not bug["fixed"] and outcome.code in bug["checks"] and explained:
            return _advice(bug)
    return ""


def why_it_ended(manifest: Mapping[str, Any]) -> str:
    """The bug, if any, that is not fixed and ends a run as this one ended."""
    failure = str(manifest.get("failure", ""))
    for bug in manifest.get("upstream_bugs", ()):
        if not bug["fixed"] and not bug["checks"] and re.search(bug["names"], failure):
            return _advice(bug)
    return ""


def _advice(bug: Bug) -> str:
    return f"{bug['issue']}; run again with `--fix {bug['id']}` to see what is left"
