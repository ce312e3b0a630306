"""All kinds of records, and their lines of JSON.

A later version adds optional fields and kinds (docs/api.md): fields that are not known here are left out when a line is
read, and a line of an unknown kind is an `UnknownRecord`.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar, Union, cast

import msgspec
from msgspec.structs import replace

from verifier.core.record import Record, UnknownRecord, kind_of
from verifier.core.stage import Stage, modules_of
from verifier.errors import UsageError

KINDS: dict[str, type[Record]] = {
    kind_of(item): item
    for module in modules_of("records")
    for item in vars(module).values()
    if isinstance(item, type) and issubclass(item, Record) and "/" in kind_of(item)
}
"""Class of a record by its ``stage/kind``."""
ANY: Any = Union[tuple(KINDS[tag] for tag in sorted(KINDS))]  # noqa: UP007 - a union of as many as there are
"""Any record."""

encode = msgspec.json.Encoder().encode
"""One line of JSON for a record; fields that have their default value are left out."""
OWN_KINDS: dict[str, type[Record]] = {}
"""Class by its ``stage/kind``, of the kinds that other packages declare."""
R = TypeVar("R", bound=Record)


def own_kind(declared: type[R]) -> type[R]:
    """Declare a kind of records of another package; a decorator of its class, which has a tag ``stage/kind``.

    Traces with such records are read as objects of the class where it is declared, and as `UnknownRecord` elsewhere.

    Raises:
        UsageError: the tag begins with no stage, or is another class's.
    """
    tag = kind_of(declared)
    if tag.partition("/")[0].upper() not in Stage.__members__ or "/" not in tag:
        raise UsageError(f"the kind `{tag}` of `{declared.__qualname__}` is no stage/kind, such as rollout/{tag}")
    other = KINDS.get(tag) or OWN_KINDS.get(tag)
    if other is not None and (other.__module__, other.__qualname__) != (declared.__module__, declared.__qualname__):
        raise UsageError(f"the kind `{tag}` of `{declared.__qualname__}` is taken by `{other.__qualname__}`")
    msgspec.json.Decoder(declared)  # refuses fields that JSON cannot hold
    OWN_KINDS[tag] = declared
    return declared


@functools.cache
def _decoder(own: tuple[type[Record], ...]) -> msgspec.json.Decoder[Any]:
    kinds = (*KINDS.values(), *own)
    return msgspec.json.Decoder(Union[kinds])  # noqa: UP007 - as above


def decode(line: bytes) -> Record | UnknownRecord:
    """Inverse of `encode`; raises msgspec.MsgspecError or RecursionError for a line that is no record."""
    try:
        return cast("Record", _decoder(tuple(OWN_KINDS.values())).decode(line))
    except msgspec.ValidationError:
        unknown = msgspec.json.decode(line, type=UnknownRecord)
        if unknown.kind in KINDS or unknown.kind in OWN_KINDS:
            raise
        return replace(unknown, fields=msgspec.json.decode(line))
