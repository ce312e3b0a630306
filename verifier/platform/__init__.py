"""Tiers of this machine, and the replacements that are installed before Megatron is imported."""

from verifier.platform.tier import Tier, install_for, select

__all__ = ["Tier", "install_for", "select"]
