"""The two tiers, stand-ins and upstream fixes, in place before Megatron is imported."""

from verifier.platform.tier import Tier, install_for, select

__all__ = ["Tier", "install_for", "select"]
