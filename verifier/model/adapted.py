"""Directories of adapters' matrices, and what these are added to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

_ADAPTED = "adapted.json"


class Adapted(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a checkpoint directory whose tensors are adapters: NAME.lora_A.weight and NAME.lora_B.weight."""

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
        """Read it from a checkpoint directory; None for one of whole weights."""
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
