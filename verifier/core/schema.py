"""All kinds of records, and their lines of JSON."""

from __future__ import annotations

from typing import Any, Union

import msgspec

from verifier.core import (
    records_activations,
    records_config,
    records_data,
    records_gradients,
    records_policy,
    records_run,
    records_tokens,
    records_trainer,
    records_weights,
)
from verifier.core.record import Record, kind_of

KINDS: dict[str, type[Record]] = {
    kind_of(item): item
    for module in (
        records_config,
        records_data,
        records_weights,
        records_tokens,
        records_activations,
        records_trainer,
        records_gradients,
        records_policy,
        records_run,
    )
    for item in vars(module).values()
    if isinstance(item, type) and issubclass(item, Record) and "/" in kind_of(item)
}
"""Class of a record by its ``stage/kind``."""
ANY: Any = Union[tuple(KINDS[tag] for tag in sorted(KINDS))]  # noqa: UP007 - a union of as many as there are
"""Any record."""

encode = msgspec.json.Encoder().encode
"""One line of JSON for a record; fields that have their default value are left out."""
decode = msgspec.json.Decoder(ANY).decode
"""Inverse of `encode`; raises msgspec.MsgspecError or RecursionError for a line that `encode` did not make."""
