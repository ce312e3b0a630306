"""JSON Schemas of a gate and its cards: ``python -m tests.meta.gate_schema`` writes them to docs/ anew."""

from __future__ import annotations

import json

import msgspec

from tests.meta.sources import ROOT
from verifier.campaign.gate.card import Card
from verifier.report.gate_result import GateResult

SCHEMAS = {
    "gate-schema.json": (GateResult, "The result of a verifier gate"),
    "card-schema.json": (Card, "The verification card of a model"),
}
"""File in docs/ -> the object that it describes, as `verifier gate` writes it, and its title."""


def rendered(name: str) -> str:
    """Return a published file."""
    kind, title = SCHEMAS[name]
    (result,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, "title": title, **result, "$defs": components}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name in SCHEMAS:
        (ROOT / "docs" / name).write_text(rendered(name))
