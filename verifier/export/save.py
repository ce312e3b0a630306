"""Writer of a Hugging Face checkpoint directory, shard by shard, visible only when complete; and of adapters to one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from verifier.errors import UsageError
from verifier.model.checkpoint import INDEX, read_header, write_shards

if TYPE_CHECKING:
    import torch

_ADAPTED = "adapted.json"


class Adapted(msgspec.Struct, frozen=True, kw_only=True):
    """What the tensors of a checkpoint directory are adapters of: NAME.lora_A.weight, NAME.lora_B.weight."""

    base: str
    """Directory of the frozen weights."""
    scaling: float
    """Factor of each product B A."""
    names: Mapping[str, Sequence[str]]
    """Each A that the directory has -> names for all tensors that share it, its own first."""
    how: Literal["beside", "within", "merged"] = "beside"
    """A product is computed beside the base's; the base has it already; or base and product are added and rounded."""

    @classmethod
    def of(cls, folder: Path) -> Adapted | None:
        """What a checkpoint directory adapts; None of one of whole weights."""
        file = folder / _ADAPTED
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.exists() else None

    def save(self, folder: Path) -> None:
        """Write it into a directory of matrices."""
        (folder / _ADAPTED).write_bytes(msgspec.json.encode(self))

    def merged(self, folder: Path) -> Path:
        """Directory of the same matrices as an engine has them that gets base and adapters as one."""
        found = folder / "merged"
        if not found.exists():
            shutil.copytree(folder, found, copy_function=os.link)
            (found / _ADAPTED).unlink()
            msgspec.structs.replace(self, how="merged").save(found)
        return found


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
