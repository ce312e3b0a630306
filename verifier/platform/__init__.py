"""Which tier this machine runs, and what must be in place before Megatron is imported."""

from verifier.platform.tier import Tier, install_for, select

__all__ = ["Tier", "install_for", "select"]
