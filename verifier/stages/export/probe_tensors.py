"""Probes of tensors on their way: the source's, an export stream, the files of a checkpoint; torch alone."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from verifier.core.reader import digest_of
from verifier.core.record import Probe, real
from verifier.model.checkpoint import INDEX, Checkpoint
from verifier.model.families import copies_of
from verifier.plan.digest import described, digest_tensor, digest_tensors
from verifier.stages.export.records import (
    ExportedTensor,
    ExportStream,
    MergedMatrix,
    Reread,
    SavedCheckpoint,
    SavedFiles,
    SavedTensor,
)
from verifier.stages.load.records import SourceFiles, SourceTensor
from verifier.trainer.merge_rounding import MergeGap
from verifier.trainer.model_files import beside_weights, holds_weights

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor | np.ndarray

ARRAYS = -1
"""Place of all arrays among the beginnings of tensors' memory: an array does not say where its memory begins."""


def record_tensors(
    probe: Probe, kind: type[Any], tensors: Iterable[tuple[str, Tensor]], version: int = 0, **fields: Any
) -> None:
    """Digest named tensors as records of a kind: those of a list together, others one by one as they come."""
    for group in [tensors] if isinstance(tensors, list) else ([pair] for pair in tensors):
        digests = digest_tensors(tensor for _, tensor in group)
        for (name, tensor), digest in zip(group, digests, strict=True):
            probe.emit(kind(name=name, version=version, **described(tensor, digest), **fields))


def passing(
    probe: Probe, kind: type[Any], tensors: Iterable[tuple[str, torch.Tensor]], version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors, each digested where it is as it passes."""
    for pair in tensors:
        record_tensors(probe, kind, [pair], version)
        yield pair


def record_source(probe: Probe, source: Checkpoint) -> None:
    """Digest the source checkpoint, tensor by tensor."""
    for item in source_tensors(source):
        probe.emit(item)


def source_tensors(
    source: Checkpoint, rounded: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> Iterator[SourceTensor]:
    """Each tensor of the source checkpoint as it is recorded, with its digest, maybe rounded before."""
    copies = copies_of(source.config)
    for name in source.names():
        yield SourceTensor(name=name, copy_of=copies.get(name, ""), **described(rounded(source.read(name))))


def recorded(probe: Probe, stream: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
    """The export stream, digested as it passes; and again what is still held where a later one shares its memory."""
    held: dict[int, list[tuple[str, str, weakref.ref[Tensor]]]] = {}  # by where their memory begins
    reread: dict[str, Reread] = {}
    count = 0
    for name, tensor in stream:
        digest = digest_tensor(tensor)
        probe.emit(ExportedTensor(name=name, version=version, **described(tensor, digest)))
        begin = ARRAYS if isinstance(tensor, np.ndarray) else tensor.untyped_storage().data_ptr()
        neighbours = held.setdefault(begin, [])
        neighbours[:] = [item for item in neighbours if item[2]() is not None]
        for earlier, was, reference in neighbours:
            other = reference()
            known = reread.get(earlier)
            if other is None or not _share_memory(other, tensor) or (known and known.still_held != was):
                continue
            reread[earlier] = Reread(name=earlier, handed_over=was, still_held=digest_tensor(other))
        neighbours.append((name, digest, weakref.ref(tensor)))
        count += 1
        yield name, tensor
    probe.emit(ExportStream(name="the export", version=version, num_tensors=count, reread=tuple(reread.values())))


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """True if some byte between the first and the last of one tensor is one of the other's range too."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.may_share_memory(one, other)
    ends = []
    for item in (one, other):
        last = sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
        ends.append(item.data_ptr() + (last + 1) * item.element_size())
    return max(one.data_ptr(), other.data_ptr()) < min(ends)


def merged_matrix(name: str, gap: MergeGap, version: int) -> MergedMatrix:
    """Record of the rounding of a merged matrix."""
    return MergedMatrix(
        name=name, version=version, dtype=gap.dtype, rank_of_adapter=gap.rank, gap=real(gap.gap), where=gap.where
    )


class IndexedFiles:
    """Tensors in the files of a saved checkpoint, where its index says that they are.

    Attributes:
        names: of the tensors that are there, by file.
        missing: names that the index places in a file that does not hold them.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / INDEX
        listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        self._held: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118 - no mapping
                if not listed or listed.get(name) == path.name:
                    self._held[name] = file
        self.names = self._held.keys()
        self.missing = tuple(sorted(listed.keys() - self.names))

    def read(self, name: str) -> torch.Tensor:
        """A tensor by name."""
        tensor: torch.Tensor = self._held[name].get_tensor(name)
        return tensor


def record_saved(probe: Probe, files: IndexedFiles, version: int, copies: Mapping[str, str] | None = None) -> None:
    """Tensors that a reader finds in a saved checkpoint; `copies` are further names of some of them."""
    names = {name: name for name in files.names} | {**(copies or {})}
    record_tensors(probe, SavedTensor, ((name, files.read(own)) for name, own in names.items()), version)
    probe.emit(SavedCheckpoint(name="shards", version=version, missing=files.missing))


def record_files(probe: Probe, source: Path, folder: Path, version: int) -> None:
    """Record the files beside the weights and config.json of a source, and of a folder that was exported to."""
    kept = [file for file in beside_weights(source) if not holds_weights(file.name)]
    probe.emit(SourceFiles(name="files", version=version, digests=_digests(kept)))
    probe.emit(SavedFiles(name="files", version=version, digests=_digests(beside_weights(folder))))


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: digest_of(file.read_bytes()) for file in files}
