"""Version of this package that runs, and the machine under it, for manifests and ledgers."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from verifier import __version__
from verifier.core.plugins import installed_plugins
from verifier.platform.pins import installed_versions


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
