"""Errors on their way out of a process: as a JSON record, and raised again on the other side. Torch-free."""

from __future__ import annotations

from typing import Any

from verifier.errors import ContractError, InternalError, UsageError, VerifierError
from verifier.transport.wire import TransferFailed

CARRIED = (
    VerifierError,
    RuntimeError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    OSError,
)
"""What upstream code raises at a request that it cannot serve; reported to who asked, while the process lives on."""

_KINDS: dict[str, type[VerifierError]] = {
    kind.__name__: kind for kind in (UsageError, ContractError, InternalError, TransferFailed)
}


def to_record(error: BaseException) -> dict[str, Any]:
    """The error as a JSON value: its kind if it is one of ours, and one line of text."""
    if isinstance(error, VerifierError):
        return {"error": type(error).__name__, "message": str(error)}
    line = " ".join(str(error).split())[:600]
    return {"error": "", "message": f"{type(error).__name__}: {line}"}


def raise_record(record: dict[str, Any], doing: str, otherwise: type[VerifierError] = InternalError) -> None:
    """Raise what `to_record` carried, if the record is one.

    Args:
        record: a reply.
        doing: begins the sentence about an error that is not one of ours.
        otherwise: raised for such an error.
    """
    if "error" not in record:
        return
    kind = _KINDS.get(record["error"])
    if kind is not None:
        raise kind(record["message"])
    raise otherwise(f"{doing}: {record['message']}")
