"""Which transfer group an address asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifier.errors import ContractError
from verifier.transport.gloo import GlooGroup

if TYPE_CHECKING:
    from verifier.transport.cuda_ipc import IpcGroup, Share
    from verifier.transport.nccl import NcclGroup

    Group = GlooGroup | NcclGroup | IpcGroup


def over(control: GlooGroup, share: Share | None = None) -> Group:
    """The group that moves the bytes among the members who can already exchange words.

    Args:
        control: joined.
        share: for IPC on trainer rank 0: its end of the trainer ranks' rounds.

    Raises:
        ContractError: an address of an unknown kind.
    """
    kind = control.address.kind
    if kind == "gloo":
        return control
    if kind == "nccl":
        from verifier.transport.nccl import NcclGroup

        return NcclGroup(control)
    if kind == "ipc":
        from verifier.transport.cuda_ipc import IpcGroup

        return IpcGroup(control, share)
    raise ContractError(f"there is no transport `{kind}`")
