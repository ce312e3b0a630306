"""A trace's JSON Schema: ``python -m tests.meta.trace_schema > docs/trace-schema.json`` writes it anew."""

from __future__ import annotations

import json

import msgspec

from verifier.core.manifest import Manifest
from verifier.core.schema import ANY


def rendered() -> str:
    """Return the published file: ``$defs/Manifest`` for manifest.json, the root for each line of evidence."""
    (record, _), components = msgspec.json.schema_components([ANY, Manifest], ref_template="#/$defs/{name}")
    dialect, title = "https://json-schema.org/draft/2020-12/schema", "A line of evidence of a verifier trace"
    schema = {"$schema": dialect, "title": title, **record, "$defs": components}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
