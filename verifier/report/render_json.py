"""The report for machines: JSON, complete."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from verifier.core.finding import Outcome
from verifier.core.manifest import Manifest
from verifier.core.stage import Stage
from verifier.report.render_text import first_line, grouped, located
from verifier.report.report import Report, explanation, why_it_ended

_OF_OUTCOME = (
    "code", "name", "verdict", "sentence", "num_compared", "not_recorded", "moved", "left_out", "error", "known_bug",
    "suspected", "shares", "finding",
)  # fmt: skip


def render_json(report: Report) -> str:
    """One JSON object; numbers that JSON cannot spell (infinity, NaN) become strings."""
    found = {
        "format": 1,
        "verdict": report.verdict.name.lower(),
        "exit_code": int(report.exit_code),
        "trace": report.trace,
        "run": msgspec.to_builtins(report.manifest),
        "outcomes": [_outcome(item, report.manifest) for item in report.outcomes],
        "not_judged": list(report.not_judged),
        "widened": list(report.widened),
        "unreached": list(report.unreached),
        "resembles": msgspec.to_builtins(report.resembles),
        "cause": _cause(report),
        "ended_by": why_it_ended(report.manifest),
        "switched_off": list(report.switched_off),
        "out_of_scope": dict(report.out_of_scope),
    }
    del found["run"]["files"]  # digests of the trace's files; the manifest's own stands for them
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _cause(report: Report) -> dict[str, Any] | None:
    if not report.violated or (finding := report.violated[0].finding) is None:
        return None
    first = finding.first
    return {
        "code": report.violated[0].code,
        "stage": first.stage.label,
        "version": first.version,
        "what": first.what,
        "owner": located(first.owner, report.manifest),
        "kinds": grouped({item.what for item in finding.bad or (first,)}),
    }


def _outcome(outcome: Outcome, manifest: Manifest) -> dict[str, Any]:
    made = {"verdict": outcome.verdict.name.lower(), "sentence": first_line(outcome)}
    made["known_bug"] = explanation(outcome, manifest)
    return {name: made[name] if name in made else _plain(getattr(outcome, name)) for name in _OF_OUTCOME}


def _plain(value: Any) -> Any:
    if isinstance(value, Stage):
        return value.label
    if is_dataclass(value):
        names = [item.name for item in fields(value) if item.name not in ("left_out", "widened")]  # the outcome's own
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
