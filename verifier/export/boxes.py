"""From the numbers that a local tensor holds to the boxes of the checkpoint that it is made of.

A box is a range of one checkpoint tensor along one dim, whole along the others (`verifier.export.sharding`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.export.sharding import Box
from verifier.model.numbered import Numbering, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Parts of the checkpoint that a local tensor is made of; the fields are those of `ParamPlacement`."""

    dim: int
    transposed: bool
    boxes: tuple[Box, ...]


def boxes_of(numbers: Numbers, numbering: Numbering) -> Boxes | None:
    """Return the boxes that, one after another along some dim, are these numbers; None where no list of boxes is.

    Of several ways the first: not transposed, and along the lowest dim.
    """
    for transposed in (False, True)[: 1 + (numbers.ndim > 1)]:
        for dim in range(numbers.ndim if numbers.size else 0):
            boxes = _along(dim, transposed, numbers, numbering)
            if boxes is not None:
                return Boxes(dim=dim, transposed=transposed, boxes=boxes)
    return None


def _along(dim: int, transposed: bool, numbers: Numbers, numbering: Numbering) -> tuple[Box, ...] | None:
    """Return the boxes along one dim of the local tensor, each index of which must be one index of one source."""
    firsts = np.moveaxis(numbers, dim, 0).reshape(numbers.shape[dim], -1)[:, 0]
    sources = np.searchsorted(numbering.starts, firsts, side="right") - 1
    at = np.zeros_like(firsts)
    leading = np.full_like(firsts, -1)
    steps = np.zeros((numbers.ndim, len(firsts)), np.int64)
    for source in np.unique(sources):
        whole = numbering.shapes[numbering.names[int(source)]]
        stacked = len(whole) - numbers.ndim
        if stacked not in (0, 1):
            return None
        shape, strides = _laid_out(whole[stacked:], transposed)
        if any(shape[other] != numbers.shape[other] for other in range(numbers.ndim) if other != dim):
            return None
        mine = sources == source
        within = firsts[mine] - numbering.starts[source]
        if stacked:
            leading[mine], within = np.divmod(within, math.prod(shape))
        at[mine], rest = np.divmod(within, strides[dim])
        if np.any(rest) or np.any(at[mine] >= shape[dim]):
            return None
        steps[:, mine] = np.array(strides)[:, None]
    expected = firsts.reshape([-1 if other == dim else 1 for other in range(numbers.ndim)])
    for other in range(numbers.ndim):
        if other != dim:
            ranges = np.arange(numbers.shape[other]).reshape([-1 if d == other else 1 for d in range(numbers.ndim)])
            step = steps[other].reshape([-1 if d == dim else 1 for d in range(numbers.ndim)])
            expected = expected + ranges * step
    if not np.array_equal(expected, numbers):
        return None
    breaks = np.flatnonzero((np.diff(sources) != 0) | (np.diff(leading) != 0) | (np.diff(at) != 1)) + 1
    begins, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(firsts)]
    return tuple(
        Box(
            numbering.names[int(sources[begin])], int(at[begin]), int(at[end - 1]) + 1,
            None if leading[begin] < 0 else int(leading[begin]),
        )
        for begin, end in zip(begins, ends, strict=True)
    )  # fmt: skip


def _laid_out(shape: Sequence[int], transposed: bool) -> tuple[list[int], list[int]]:
    """Return shape and strides, in elements, of a contiguous tensor; transposed, of its view with swapped last dims."""
    sizes = list(shape)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if transposed:
        sizes[-2:], strides[-2:] = sizes[:-3:-1], strides[:-3:-1]
    return sizes, strides
