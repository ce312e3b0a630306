"""Which transfer group an address asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verifier.errors import ContractError
from verifier.transport.gloo import GlooGroup

if TYPE_CHECKING:
    from verifier.transport.cuda_ipc import IpcGroup
    from verifier.transport.nccl import NcclGroup

    Group = GlooGroup | NcclGroup | IpcGroup

Show = Callable[[dict[str, Any]], Sequence[dict[str, Any]]]


def over(words: GlooGroup, show: Show | None = None) -> Group:
    """The group that moves the bytes among the members who can already exchange words.

    Args:
        words: joined.
        show: for IPC on trainer rank 0: see `IpcGroup`.

    Raises:
        ContractError: an address of an unknown kind.
    """
    kind = words.address.kind
    if kind == "gloo":
        return words
    if kind == "nccl":
        from verifier.transport.nccl import NcclGroup

        return NcclGroup(words)
    if kind == "ipc":
        from verifier.transport.cuda_ipc import IpcGroup

        return IpcGroup(words, show)
    raise ContractError(f"there is no transport `{kind}`")
