"""The union of all kinds of records, and how one becomes a line of JSON and comes back."""

from __future__ import annotations

import msgspec

from verifier.core import records_engine, records_logprobs, records_tokens, records_weights
from verifier.core.record import Record


def _kinds() -> dict[str, type[Record]]:
    """Every class of records that has a tag, by its tag."""
    found: dict[str, type[Record]] = {}
    for module in (records_weights, records_engine, records_tokens, records_logprobs):
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, Record) and "stage" in vars(item):
                found[str(item.__struct_config__.tag)] = item
    return found


KINDS: dict[str, type[Record]] = _kinds()
"""Class of a record by its ``stage/kind``."""

_ENCODER = msgspec.json.Encoder()
_DECODERS = {tag: msgspec.json.Decoder(kind) for tag, kind in KINDS.items()}


class _Tagged(msgspec.Struct):
    kind: str


_TAG = msgspec.json.Decoder(_Tagged)


def encode(record: Record) -> bytes:
    """One line of JSON; fields that have their default value are left out."""
    return _ENCODER.encode(record)


def decode(line: bytes) -> Record:
    """Inverse of `encode`.

    Raises:
        msgspec.MsgspecError, RecursionError: no line that `encode` made.
    """
    tag = _TAG.decode(line).kind
    if tag not in _DECODERS:
        raise msgspec.ValidationError(f"no record is of kind `{tag}`")
    return _DECODERS[tag].decode(line)
