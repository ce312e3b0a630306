"""The report as JSON: complete, nothing cut, nothing left out."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from verifier.core.finding import Outcome
from verifier.core.manifest import Manifest
from verifier.core.stage import Stage
from verifier.report.known_bugs import explanation, why_it_ended
from verifier.report.render_text import first_line
from verifier.report.report import Report

FORMAT = 1


def render_json(report: Report) -> str:
    """One JSON object; numbers that JSON cannot spell (infinity, NaN) become strings."""
    found = {
        "format": FORMAT,
        "verdict": report.verdict.name.lower(),
        "exit_code": int(report.exit_code),
        "trace": report.trace,
        "run": msgspec.to_builtins(report.manifest),
        "outcomes": [_outcome(item, report.manifest) for item in report.outcomes],
        "ended_by": why_it_ended(report.manifest),
        "switched_off": list(report.switched_off),
        "out_of_scope": list(report.out_of_scope),
    }
    del found["run"]["files"]  # digests of the trace's files; the manifest's own stands for them
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _outcome(outcome: Outcome, manifest: Manifest) -> dict[str, Any]:
    return {
        "code": outcome.code,
        "name": outcome.name,
        "verdict": outcome.verdict.name.lower(),
        "sentence": first_line(outcome),
        "num_compared": outcome.num_compared,
        "not_recorded": list(outcome.not_recorded),
        "error": outcome.error,
        "known_bug": explanation(outcome, manifest),
        "finding": _plain(outcome.finding),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Stage):
        return value.label
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
