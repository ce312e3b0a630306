"""Choice of the transfer group that an address asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifier.errors import ContractError

if TYPE_CHECKING:
    from verifier.transport.cuda_ipc import TrainerRounds
    from verifier.transport.gloo import GlooGroup
    from verifier.transport.group import TransferGroup


def bulk_group(control: GlooGroup, rounds: TrainerRounds | None = None) -> TransferGroup:
    """Return the group that moves the bytes among members that are already connected.

    `rounds` is the exchange among trainer ranks, for IPC on trainer rank 0 alone.

    Raises:
        ContractError: the address has an unknown kind.
    """
    kind = control.address.kind
    if kind == "gloo":
        return control
    if kind == "nccl":
        from verifier.transport.nccl import NcclGroup

        return NcclGroup(control)
    if kind == "ipc":
        from verifier.transport.cuda_ipc import IpcGroup

        return IpcGroup(control, rounds)
    raise ContractError(f"there is no transport `{kind}`: use gloo, nccl or ipc")
