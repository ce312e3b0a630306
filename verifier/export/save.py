"""Writer of a Hugging Face checkpoint directory: shard by shard, visible only when complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.errors import UsageError
from verifier.model.checkpoint import write_shard

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 28
"""Greatest size of a shard, in bytes; a larger tensor gets a shard of its own."""


def save_checkpoint(path: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
    """Write a checkpoint directory for `open_checkpoint`, transformers and vLLM; at most one shard is in memory.

    Args:
        path: directory to create; it appears only when everything is written.
        config: contents of config.json.
        tensors: (name, tensor) in any order; each is stored in its own dtype.

    Raises:
        UsageError: the directory cannot be written, a full disk included.
    """
    aside = path.with_name(f"{path.name}.partial-{os.getpid()}")
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = total = 0

    def flush() -> None:
        nonlocal shard, shard_bytes
        if shard:
            write_shard(aside / f"shard-{len(shards)}.safetensors", shard)
            shards.append(list(shard))
            shard, shard_bytes = {}, 0

    try:
        aside.mkdir(parents=True)
        for name, tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            if shard and shard_bytes + num_bytes > SHARD_BYTES:
                flush()
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            shard_bytes += num_bytes
            total += num_bytes
        flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            (aside / f"shard-{number}.safetensors").rename(aside / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (aside / "config.json").write_text(json.dumps(dict(config), indent=1))
        aside.rename(path)
    except OSError as problem:
        raise UsageError(f"the exported checkpoint cannot be written to `{path}`: {problem.strerror}") from problem
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path
