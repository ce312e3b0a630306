"""JSON Schema of a trace's manifest and of a line of its evidence: ``python -m verifier.core.schema``."""

from __future__ import annotations

import json
from typing import Any, Union

import msgspec

from verifier.core.manifest import Manifest
from verifier.core.records import KINDS

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return one document: ``$defs/Manifest`` for manifest.json, the root for each line of evidence."""
    lines: Any = Union[tuple(KINDS[tag] for tag in sorted(KINDS))]  # noqa: UP007 - a union of as many as there are
    (record, _), components = msgspec.json.schema_components([lines, Manifest], ref_template="#/$defs/{name}")
    return {"$schema": DIALECT, "title": "A line of evidence of a verifier trace", **record, "$defs": components}


def rendered() -> str:
    """Return the published file."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
