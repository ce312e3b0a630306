"""Generated checkpoints: seeded, the same bytes on every machine, and no two tensors, rows, heads or experts alike.

A published initialisation (std 0.02, norms 1, biases 0) hides mapping errors: norms and biases could be swapped
without a trace. Here matrices have std 1/sqrt(fan-in), no norm weight is 1 and no bias is 0. The hidden size 96 is no
power of two while every other size is split in powers of two, so no matrix is square, whole or cut by tensor
parallelism, and a transpose never fits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.errors import UsageError
from verifier.model.families import FAMILIES, JSON, Content, TensorSpec, family_of, tensors_of

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
_GENERATOR = 1  # part of the cache key: raise it when the same seed gives other bytes
_MAX_SHARD_BYTES = 256 * 2**20
_PREFIX = "tiny:"

_BASE: dict[str, JSON] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GQA = {"head_dim": 32}
_MOE = {"moe_intermediate_size": 64, "norm_topk_prob": True, "num_experts_per_tok": 4}

TINY: dict[str, tuple[str, dict[str, JSON]]] = {
    "qwen3": ("qwen3", {**_BASE, **_GQA}),
    "qwen3-tied": ("qwen3", {**_BASE, **_GQA, "tie_word_embeddings": True}),
    "llama": ("llama", {**_BASE, **_GQA, "mlp_bias": False}),
    "qwen3-moe": (
        "qwen3-moe",
        {
            **_BASE,
            **_GQA,
            **_MOE,
            "num_experts": 16,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
    ),
    "deepseek-v3": (
        "deepseek-v3",
        {
            **_BASE,
            **_MOE,
            "num_key_value_heads": 8,
            "q_lora_rank": 72,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 40,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
}
"""Model id without its "tiny:" -> family row and the sizes in config.json."""


def resolve_model(model: str, cache: Path, dtype: str = "float32") -> Path:
    """Directory of a model that the user named: a generated ``tiny:NAME``, or a local path.

    Args:
        model: "tiny:NAME" or a path of a checkpoint directory.
        cache: Where generated checkpoints are kept between runs.
        dtype: "float32" or "bfloat16"; used for generated checkpoints only.

    Raises:
        UsageError: no such generated model, or no such directory.
    """
    if model.startswith(_PREFIX):
        return write_tiny(model.removeprefix(_PREFIX), cache, dtype=dtype)
    path = Path(model)
    if not path.is_dir():
        known = ", ".join(f"`{_PREFIX}{name}`" for name in TINY)
        raise UsageError(f"unknown model `{model}`: it is neither a local checkpoint directory nor one of {known}")
    return path


def write_tiny(name: str, directory: Path, dtype: str = "float32", seed: int = 1) -> Path:
    """Write the tiny checkpoint called `name` under `directory`, or find it there.

    Args:
        name: A key of `TINY`, without "tiny:".
        directory: Cache; the checkpoint becomes a subdirectory whose name ends in the key of its contents.
        dtype: "float32" or "bfloat16"; router score biases stay float32.
        seed: Other seeds give other weights.

    Returns:
        Path of the checkpoint directory.

    Raises:
        UsageError: unknown name or dtype.
    """
    if name not in TINY:
        raise UsageError(f"unknown model `{_PREFIX}{name}`: known are {', '.join(_PREFIX + known for known in TINY)}")
    family, config = TINY[name]
    return _write(name, family, config, Path(directory), dtype, seed)


def write_family(
    family: str, directory: Path, config_overrides: Mapping[str, JSON], dtype: str = "float32", seed: int = 1
) -> Path:
    """Write a checkpoint of any size: the tiny one of the same name with other sizes in its config.json.

    Args:
        family: A key of `TINY`.
        directory: As for `write_tiny`.
        config_overrides: Config key -> value, for example ``{"hidden_size": 1024}``.
        dtype: As for `write_tiny`.
        seed: As for `write_tiny`.

    Raises:
        UsageError: unknown family or dtype, or a config that leaves the family's row.
    """
    if family not in TINY:
        raise UsageError(f"unknown family `{family}`: known are {', '.join(TINY)}")
    row, config = TINY[family]
    return _write(f"{family}-custom", row, {**config, **config_overrides}, Path(directory), dtype, seed)


def _write(label: str, family_name: str, sizes: Mapping[str, JSON], directory: Path, dtype: str, seed: int) -> Path:
    if dtype not in DTYPES:
        raise UsageError(f"generated checkpoints come in {' and '.join(DTYPES)}, not {dtype}")
    family = FAMILIES[family_name]
    config: dict[str, JSON] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        **sizes,
    }
    if family_of(config) is not family:
        raise UsageError(f"this config.json leaves what family `{family_name}` describes")
    key = hashlib.blake2b(json.dumps([_GENERATOR, seed, config], sort_keys=True).encode(), digest_size=6).hexdigest()
    target = directory / f"{label}-{dtype}-{key}"
    if target.is_dir():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=directory))
    except OSError as error:
        raise UsageError(f"cannot write a checkpoint under {directory}: {error.strerror}") from error
    try:
        _write_files(partial, list(tensors_of(family, config)), config, dtype, f"{family_name}/{seed}")
        partial.chmod(0o755)
        os.rename(partial, target)
    except OSError as error:
        if not target.is_dir():  # another process may have written the same checkpoint first
            raise UsageError(f"cannot write a checkpoint to {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_files(path: Path, specs: list[TensorSpec], config: Mapping[str, JSON], dtype: str, stream: str) -> None:
    """Write config.json, at least two shards of about the same size, and the index."""
    from safetensors.torch import save_file

    sizes = [math.prod(spec.shape) * (2 if _stored_dtype(spec, dtype) == "bfloat16" else 4) for spec in specs]
    total = sum(sizes)
    num_shards = max(2, -(-total // _MAX_SHARD_BYTES))
    shards: list[list[TensorSpec]] = [[] for _ in range(num_shards)]
    begin = 0
    for spec, size in zip(specs, sizes, strict=True):
        shards[min(num_shards - 1, begin * num_shards // total)].append(spec)
        begin += size
    shards = [shard for shard in shards if shard]
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors = {spec.name: generate(spec, dtype, stream) for spec in shard}
        save_file(tensors, path / file_name, metadata={"format": "pt"})
        (path / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(tensors, file_name)
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1) + "\n")
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def generate(spec: TensorSpec, dtype: str, stream: str) -> torch.Tensor:
    """The values of one tensor: a function of its name and the stream only, exact on every machine.

    Values come from the raw 64-bit stream of Philox, whose bits NumPy keeps stable, by exact float64 arithmetic and
    one rounding; no transcendental function is involved, so no CPU differs.

    Args:
        spec: Name, shape and content.
        dtype: "float32" or "bfloat16".
        stream: Part of the key besides the name.

    Returns:
        Tensor of spec.shape, in `dtype`, or in float32 for a score bias.
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
    else:
        values = numpy.copysign(0.02, bits) + 0.2 * bits
    tensor = torch.from_numpy(values.astype(numpy.float32).reshape(spec.shape))
    return tensor.to(getattr(torch, _stored_dtype(spec, dtype)))


def _stored_dtype(spec: TensorSpec, dtype: str) -> str:
    return "float32" if spec.content is Content.SCORE_BIAS else dtype
