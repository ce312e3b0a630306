"""Errors on their way out of an engine's process, raised again on the other side. Torch-free."""

from __future__ import annotations

from typing import Any

from verifier.errors import InternalError, VerifierError
from verifier.launch import failures
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
"""Errors that upstream code raises at a request that it cannot serve: reported to the client, and survived."""
_MAX_CAUSE = 600


def to_record(error: BaseException) -> dict[str, Any]:
    """The error as a JSON value: a reply that is no answer."""
    return {"error": failures.to_record(error)}


def raise_record(reply: dict[str, Any], doing: str, otherwise: type[VerifierError] = InternalError) -> None:
    """Raise the error that `to_record` carried, if the reply is one.

    Args:
        reply: of another process.
        doing: begins the sentence about an error that is not one of ours.
        otherwise: raised for such an error.
    """
    if "error" in reply:
        known = failures.known_error(reply["error"], (TransferFailed, *failures.OURS))
        cause = " ".join(reply["error"]["cause"].split())[:_MAX_CAUSE]
        raise known or otherwise(f"{doing}: {cause}")
