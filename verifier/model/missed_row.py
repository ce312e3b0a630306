"""The hand-written row of a model's type, where its config.json is outside of what the row says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping

from verifier.model.families import FAMILIES, JSON, Family, family_of


def missed_row(config: Mapping[str, JSON]) -> str:
    """Sentence on the first condition that a config does not meet, and what that costs; empty where there is none."""
    row = next((item for item in FAMILIES.values() if item.model_type == config.get("model_type")), None)
    if row is None or family_of(config) is not None:
        return ""
    return (
        f"the hand-written row {row.name} does not hold for this model: config.json has {unmet(row, config)}; "
        "without it there are no adapters, `verifier train` does not judge what its ranks load, and a load that errs "
        "alike on all ranks is seen in log-probabilities alone (LGP001)"
    )


def unmet(row: Family, config: Mapping[str, JSON]) -> str:
    """Clause on the first condition of a row that a config does not meet."""
    if config.get("architectures") != [row.architecture]:
        return f"`architectures` = {json.dumps(config.get('architectures'))}, where it needs [{row.architecture}]"
    for key, allowed in row.requires.items():
        if config.get(key) not in allowed:
            values = " or ".join("none" if value is None else json.dumps(value) for value in allowed)
            return f"`{key}` = {json.dumps(config.get(key))}, where it needs {values}"
    return f"no `{next(key for key in row.needs if config.get(key) is None)}`, which it needs"
