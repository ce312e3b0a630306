"""All kinds of records, their lines of JSON, and a trace's JSON Schema: ``python -m verifier.core.schema``."""

from __future__ import annotations

import json
from typing import Any, Union

import msgspec

from verifier.core import records_tokens, records_weights
from verifier.core.manifest import Manifest
from verifier.core.record import Record, kind_of

KINDS: dict[str, type[Record]] = {
    kind_of(item): item
    for module in (records_weights, records_tokens)
    for item in vars(module).values()
    if isinstance(item, type) and issubclass(item, Record) and "/" in kind_of(item)
}
"""Class of a record by its ``stage/kind``."""
_ANY: Any = Union[tuple(KINDS[tag] for tag in sorted(KINDS))]  # noqa: UP007 - a union of as many as there are

encode = msgspec.json.Encoder().encode
"""One line of JSON for a record; fields that have their default value are left out."""
decode = msgspec.json.Decoder(_ANY).decode
"""Inverse of `encode`; raises msgspec.MsgspecError or RecursionError for a line that `encode` did not make."""


def rendered() -> str:
    """Return the published file: ``$defs/Manifest`` for manifest.json, the root for each line of evidence."""
    (record, _), components = msgspec.json.schema_components([_ANY, Manifest], ref_template="#/$defs/{name}")
    dialect, title = "https://json-schema.org/draft/2020-12/schema", "A line of evidence of a verifier trace"
    schema = {"$schema": dialect, "title": title, **record, "$defs": components}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
