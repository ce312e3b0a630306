"""Writer of a Hugging Face checkpoint directory: shard by shard, visible only when complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.errors import UsageError
from verifier.model.checkpoint import INDEX, read_header, write_shards

if TYPE_CHECKING:
    import torch


def save_checkpoint(path: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
    """Write a checkpoint directory for `open_checkpoint`, transformers and vLLM; a few shards are in memory.

    Args:
        path: directory to create; it appears only when everything is written.
        config: contents of config.json.
        tensors: (name, tensor) in any order, on any device; each is stored in its own dtype, see `write_shards`.

    Raises:
        UsageError: the directory cannot be written, a full disk included.
    """
    aside = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        write_shards(aside / "model", tensors)
        metas = {name: meta for file in aside.iterdir() for name, meta in read_header(file).items()}
        total = sum(meta.num_bytes for meta in metas.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: metas[name].shard for name in sorted(metas)}}
        (aside / INDEX).write_text(json.dumps(index, indent=1))
        (aside / "config.json").write_text(json.dumps(dict(config), indent=1))
        aside.rename(path)
    except OSError as problem:
        raise UsageError(f"the exported checkpoint cannot be written to `{path}`: {problem.strerror}") from problem
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path
