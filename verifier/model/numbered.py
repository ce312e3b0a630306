"""Numbered checkpoints: each element holds its own number, so that what a trainer loaded says where it came from.

A dtype holds integers exactly up to a power of two, so a number is spread over passes, a digit in each. Further passes
find what an import computes: of zeros and of ones (an offset, a scale), and of scrambled numbers, which agree with the
digits only where one local element depends on one element of the checkpoint and by nothing but scale and offset.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verifier.model.checkpoint import INDEX, Checkpoint, write_shard
from verifier.model.families import copies_of

ZEROS, ONES, SCRAMBLED = "zeros", "ones", "scrambled"
_BITS = {"float64": 24, "float32": 24, "float16": 11, "bfloat16": 8, "int64": 24, "int32": 24}
"""Dtype -> bits of an integer that it holds exactly beside an offset of 1; wider ones are cast to float32."""
_ODD = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of splitmix64's finalizer, https://prng.di.unimi.it/splitmix64.c."""

Numbers = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """Numbers of a checkpoint's elements: 0, 1, 2, ... through all tensors in the order of their names."""

    shapes: Mapping[str, tuple[int, ...]]
    """Tensor name -> shape, sorted by name."""
    bits: int
    """Bits of a digit."""

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return int(self.starts[-1])

    @cached_property
    def names(self) -> list[str]:
        """Tensor names, by which `starts` is ordered."""
        return list(self.shapes)

    @cached_property
    def starts(self) -> Numbers:
        """[number of tensors + 1] first number of each tensor, and the number of all elements."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])

    @cached_property
    def digits(self) -> tuple[str, ...]:
        """Passes with the digits of the numbers, the lowest first."""
        needed = max(1, -(-max(self.num_elements - 1, 1).bit_length() // self.bits))
        return tuple(f"digit {at}" for at in range(needed))

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of all passes, each a checkpoint of its own."""
        return (ZEROS, ONES, *self.digits, SCRAMBLED)

    def values(self, name: str, which: str) -> Numbers:
        """Return the contents of one tensor in one pass."""
        shape = self.shapes[name]
        if which in (ZEROS, ONES):
            return np.full(shape, int(which == ONES), np.int64)
        begin = int(self.starts[self.names.index(name)])
        numbers = np.arange(begin, begin + math.prod(shape), dtype=np.int64)
        return self._spread(numbers, which).reshape(shape)

    def _spread(self, numbers: Numbers, which: str) -> Numbers:
        """Return a digit of numbers, or their scrambled form, both below ``2**bits``."""
        mask = (1 << self.bits) - 1
        if which == SCRAMBLED:
            mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            for shift, odd in zip((np.uint64(30), np.uint64(27)), _ODD, strict=True):
                mixed = (mixed ^ (mixed >> shift)) * odd
            return ((mixed ^ (mixed >> np.uint64(31))) & np.uint64(mask)).astype(np.int64)
        return (numbers >> (self.bits * self.digits.index(which))) & mask

    def decode(self, read: Mapping[str, Values]) -> Decoded | str:
        """Return which elements of the checkpoint a local tensor holds; or, in words, why it holds none as they are.

        `read` has the contents of the local tensor after each pass.
        """
        if unloaded := max(int(np.isnan(values).sum()) for values in read.values()):
            return f"{unloaded:,} of {read[ZEROS].size:,} elements were not loaded from the checkpoint"
        offset = read[ZEROS].astype(np.float64)
        scale = read[ONES] - offset
        if not np.all(scale):
            return f"{int((scale == 0).sum()):,} of {scale.size:,} elements do not depend on the checkpoint"
        if np.ptp(offset) or np.ptp(scale):
            return "scale or offset of the checkpoint's values differ within it"
        found = {which: (read[which] - offset) / scale for which in (*self.digits, SCRAMBLED)}
        numbers = np.zeros(offset.shape, np.int64)
        for at, which in enumerate(self.digits):
            digit = found[which]
            if np.any(digit != np.rint(digit)) or digit.min() < 0 or digit.max() >= 1 << self.bits:
                return "it is no copy of the checkpoint's values, scaled and shifted: numbers come out as others"
            numbers += digit.astype(np.int64) << (self.bits * at)
        if numbers.max() >= self.num_elements or np.any(self._spread(numbers, SCRAMBLED) != found[SCRAMBLED]):
            return "it is no copy of the checkpoint's values: scrambled numbers come from other elements"
        return Decoded(numbers=numbers, scale=float(scale.flat[0]), offset=float(offset.flat[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Elements of the checkpoint that a local tensor holds, as ``scale * value + offset``."""

    numbers: Numbers
    scale: float
    offset: float


def numbering_of(checkpoint: Checkpoint, dtype: str) -> Numbering | str:
    """Return the numbering of a checkpoint but for `copies_of`, for a trainer of this dtype; or why there is none."""
    for name, meta in checkpoint.metas.items():
        if meta.dtype not in _BITS:
            return f"`{name}` is stored in {meta.dtype}, which cannot hold a number"
    shared = copies_of(checkpoint.config)
    shapes = {name: meta.shape for name, meta in checkpoint.metas.items() if name not in shared}
    return Numbering(shapes=shapes, bits=min(_BITS[kind] for kind in (dtype, *_dtypes(checkpoint))))


def write_numbered(folder: Path, checkpoint: Checkpoint, numbering: Numbering, which: str) -> None:
    """Write one pass: the checkpoint's config and names, shapes and dtypes of its tensors, other contents.

    Raises:
        UsageError: it cannot be written.
    """
    import torch

    folder.mkdir()
    for file in sorted(checkpoint.path.glob("*.json")):
        if file.name != INDEX:
            shutil.copyfile(file, folder / file.name)
    tensors: dict[str, Any] = {
        name: torch.from_numpy(numbering.values(name, which)).to(getattr(torch, meta.dtype))
        for name, meta in checkpoint.metas.items()
        if name in numbering.shapes
    }
    write_shard(folder / "model.safetensors", tensors)


def _dtypes(checkpoint: Checkpoint) -> set[str]:
    return {meta.dtype for meta in checkpoint.metas.values()}
