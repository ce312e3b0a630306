"""A config in text: each key with its value, as YAML that `--config` takes again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifier.knob import KnobEntry, entries


def resolved(config: Any, owners: Mapping[str, str]) -> str:
    """Print a config.

    Args:
        config: the config.
        owners: key -> who gave its value; a knob that nobody gave has its default.

    Returns:
        A line per knob: key, value, and in a comment the owner and the default.
    """
    lines = []
    for entry in entries(type(config)):
        value = config
        for name in entry.key.split("."):
            value = getattr(value, name)
        text = f"{entry.key}: {written(entry, value)}"
        note = f"{owners[entry.key]}; default {default(entry)}" if entry.key in owners else "default"
        if entry.computed and entry.key not in owners:
            text = f"# {text}"
        lines.append(f"{text:<40}  # {note}\n")
    return "".join(lines)


def written(entry: KnobEntry, value: Any) -> str:
    """Write a value as YAML, in its user's spelling."""
    if isinstance(value, tuple):
        return json.dumps(list(value))
    spelled = entry.spelled(value)
    return json.dumps(str(spelled) if isinstance(spelled, Path) else spelled)


def default(entry: KnobEntry) -> str:
    """Describe the default of a knob."""
    if entry.required:
        return "none, it is required"
    return "computed" if entry.computed else written(entry, entry.default)
