"""JSON Schema of a gate's result: ``python -m tests.meta.gate_schema > docs/gate-schema.json`` writes it anew."""

from __future__ import annotations

import json

import msgspec

from verifier.report.gate_result import GateResult


def rendered() -> str:
    """Return the published file, whose root is the object that `verifier gate --json` writes."""
    (result,), components = msgspec.json.schema_components([GateResult], ref_template="#/$defs/{name}")
    dialect, title = "https://json-schema.org/draft/2020-12/schema", "The result of a verifier gate"
    schema = {"$schema": dialect, "title": title, **result, "$defs": components}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
