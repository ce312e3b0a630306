"""Libraries of trainer ranks without any module that a row or a check stands in: Megatron on this machine's tier."""

from __future__ import annotations

from verifier.platform import import_megatron, select


def preload() -> None:
    """Import them, in a fork server; ranks import the rest of this package after the fork."""
    import_megatron(select())
    import numba  # noqa: F401
