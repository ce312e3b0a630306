"""Writer of generated checkpoints: config.json, shards, index and seeded values of each tensor.

A published initialisation (std 0.02, norms 1, biases 0) hides mapping errors: swapped norms or biases would not show.
Here matrices have std 1/sqrt(fan-in), no norm weight is 1 and no bias is 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verifier.errors import UsageError
from verifier.model.checkpoint import INDEX, write_shard
from verifier.model.families import FAMILIES, JSON, Content, TensorSpec, copies_of, family_of, tensors_of

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
_TABLES = Path(__file__).with_name("models.yaml")
_GENERATOR = 2  # part of the cache key: raise it when the same seed gives other bytes
_MAX_SHARD_BYTES = 256 * 2**20
_WRITERS = 4
"""Number of shards that are generated and written at a time."""

Values = Callable[[TensorSpec, str, str], "torch.Tensor"]
"""(spec, dtype, stream) -> tensor, a function of the tensor's name and the stream only, exact on every machine."""
Models = Mapping[str, tuple[str, Mapping[str, JSON]]]
"""Full model id -> (key of `FAMILIES`, keys of config.json besides the architecture and the dtype)."""


@cache
def model_tables() -> dict[str, dict[str, Any]]:
    """Sections of models.yaml: model id without prefix -> row."""
    return msgspec.yaml.decode(_TABLES.read_bytes(), type=dict[str, dict[str, Any]])


def rows_of(section: str) -> dict[str, tuple[str, dict[str, JSON]]]:
    """Model id without prefix -> (key of `FAMILIES`, keys of config.json), of generated models."""
    return {name: (row["family"], row["config"]) for name, row in model_tables()[section].items()}


def require_dtype(dtype: str) -> None:
    """Raise a UsageError if generated checkpoints do not come in `dtype`."""
    if dtype not in DTYPES:
        raise UsageError(f"generated checkpoints come in {' and '.join(DTYPES)}, not {dtype}")


def generated_config(
    model: str, known: Models, dtype: str, changes: Mapping[str, JSON] | None = None
) -> dict[str, JSON]:
    """Return the config.json of a generated checkpoint; see `write_checkpoint`."""
    if model not in known:
        raise UsageError(f"unknown model `{model}`: known are {', '.join(known)}")
    require_dtype(dtype)
    family_name, sizes = known[model]
    family = FAMILIES[family_name]
    config: dict[str, JSON] = {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    config |= {**sizes, **(changes or {})}
    if family_of(config) is not family:
        raise UsageError(f"this config.json is not of family `{family_name}`: see `requires` and `needs` of the family")
    return config


def write_checkpoint(
    model: str, known: Models, directory: Path, *, dtype: str, seed: int, values: Values,
    changes: Mapping[str, JSON] | None = None, texts: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint under `directory` unless it is there already, and return its path.

    The model is a key of `known`. In the cache `directory` it is a folder whose name ends in the key of its contents.
    What families keep in float32 stays float32. `changes` are other values in config.json, for example
    ``{"hidden_size": 1024}``, and `texts` the contents of further files by name, such as a tokenizer's.

    Raises:
        UsageError: unknown model or dtype, a config that leaves the family's row, or a folder that cannot be written.
    """
    config = generated_config(model, known, dtype, changes)
    family_name, _ = known[model]
    family = FAMILIES[family_name]
    made_of = [_GENERATOR, seed, config, *([texts] if texts else [])]
    key = hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=6).hexdigest()
    target = Path(directory) / f"{model.replace(':', '-')}-{dtype}-{key}"
    return write_once(
        target, lambda: list(tensors_of(family, config)), config, dtype, f"{family_name}/{seed}", values, texts or {}
    )


def write_once(
    target: Path, specs: Callable[[], list[TensorSpec]], config: Mapping[str, JSON], dtype: str, stream: str,
    values: Values, texts: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write a checkpoint as the directory `target` unless it is there already, and return `target`.

    Raises:
        UsageError: it cannot be written.
    """

    def write(partial: Path) -> None:
        _write_files(partial, specs(), config, dtype, stream, values)
        for name, content in texts.items():
            (partial / name).write_text(content)

    return made_once(target, write)


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill a folder that becomes `target` at once when it is whole, unless it is there; return `target`.

    Several processes may do so at once: each fills a folder of its own, and the first stays.

    Raises:
        UsageError: it cannot be written.
    """
    if target.is_dir():
        return target
    directory = target.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=directory))
    except OSError as error:
        raise UsageError(f"cannot write a checkpoint under {directory}: {error.strerror}") from error
    try:
        make(partial)
        partial.chmod(0o755)
        os.rename(partial, target)
    except OSError as error:
        if not target.is_dir():  # another process may have written the same checkpoint first
            raise UsageError(f"cannot write a checkpoint to {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_files(
    path: Path, specs: list[TensorSpec], config: Mapping[str, JSON], dtype: str, stream: str, values: Values
) -> None:
    """Write config.json, at least two shards of about the same size, and the index."""
    sizes = [math.prod(spec.shape) * (2 if stored_dtype(spec, dtype) == "bfloat16" else 4) for spec in specs]
    total = sum(sizes)
    num_shards = max(2, -(-total // _MAX_SHARD_BYTES))
    places = [min(num_shards - 1, begin * num_shards // total) for begin in accumulate(sizes[:-1], initial=0)]
    groups = [list(group) for _, group in groupby(zip(places, specs, strict=True), key=itemgetter(0))]
    names = [f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)]
    shards = {name: [spec for _, spec in group] for name, group in zip(names, groups, strict=True)}

    copies = copies_of(config)

    def write(name: str) -> None:
        originals = {spec.name: replace(spec, name=copies.get(spec.name, spec.name)) for spec in shards[name]}
        write_shard(path / name, {copy: values(spec, dtype, stream) for copy, spec in originals.items()})
        (path / name).chmod(0o644)

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, shards))
    weight_map = {spec.name: name for name, shard in shards.items() for spec in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, content in ((INDEX, index), ("config.json", config)):
        (path / name).write_text(json.dumps(content, indent=1) + "\n")


def generate(spec: TensorSpec, dtype: str, stream: str) -> torch.Tensor:
    """Generate one tensor as a function of its name and the stream only, exact on every machine.

    Values come from the raw 64-bit stream of Philox, whose bits NumPy keeps stable, by exact float64 arithmetic and
    one rounding; no transcendental function is involved, so no CPU differs.
    """
    import numpy
    import torch

    digest = hashlib.blake2b(f"{stream}/{spec.name}".encode(), digest_size=16).digest()
    num_values = math.prod(spec.shape)
    raw = numpy.random.Philox(key=int.from_bytes(digest, "little")).random_raw(-(-num_values // 2))
    bits = raw.astype("<u8", copy=False).view("<u4")[:num_values].astype(numpy.float64)
    bits -= 2.0**31 - 0.5
    bits /= 2.0**31  # in (-1, 1), never 0
    if spec.content is Content.MATRIX:
        values = bits * math.sqrt(3.0 / spec.shape[-1])
    elif spec.content is Content.NORM:
        values = 1.0 + numpy.copysign(0.1, bits) + 0.3 * bits
    elif spec.content is Content.DECAY:
        values = bits - 1.5
    elif spec.content is Content.TIME_STEP:
        values = 5.0 * bits - 5.0
    elif spec.content is Content.SCORE_BIAS:
        values = numpy.copysign(0.02, bits) + 0.2 * bits - 0.75
    elif spec.content is Content.GATED_BIAS:
        values = numpy.where(numpy.abs(bits) > 0.75, 10.0, 0.2) * bits
    else:
        values = numpy.copysign(0.02, bits) + 0.2 * bits
    tensor = torch.from_numpy(values.astype(numpy.float32).reshape(spec.shape))
    return tensor.to(getattr(torch, stored_dtype(spec, dtype)))


def stored_dtype(spec: TensorSpec, dtype: str) -> str:
    """Return the dtype that one tensor has in a checkpoint of dtype `dtype`."""
    return "float32" if spec.content in (Content.SCORE_BIAS, Content.DECAY) else dtype
