"""JSON Schema of a trace's manifest and of a line of its evidence: ``python -m verifier.core.schema``."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from verifier.core.manifest import Manifest
from verifier.core.records import ANY_KIND

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return one document: ``$defs/Manifest`` for manifest.json, the root for each line of evidence."""
    (record, _), components = msgspec.json.schema_components([ANY_KIND, Manifest], ref_template="#/$defs/{name}")
    return {"$schema": DIALECT, "title": "A line of evidence of a verifier trace", **record, "$defs": components}


def rendered() -> str:
    """Return the published file."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
