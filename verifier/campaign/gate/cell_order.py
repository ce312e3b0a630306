"""The order of cells: what says most per second comes first.

A cell says things of its axes: its kind, its model, each axis of its mesh, its dtype, engine, transport, algorithm, the
stage of its fault, and each of these together with its kind. The next cell is the one with the most things that no
earlier cell says, divided by the seconds that it is expected to take; of equal ones the first of the matrix. So the
cheap golden runs come first, and one cell of each kind and axis before the second of any. A model and a kind that
nothing was said of count three times. An engine other than the last one costs its start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from verifier.report.gate_result import Cell

FIRST_S = 40.0
"""Seconds of the first imports of a worker."""
ENGINE_S = {"vllm": 20.0, "hf": 3.0}
"""Seconds of an engine's start, by its kind."""
_CELL_S = {"golden": 3.0, "roundtrip": 18.0, "train": 15.0, "faults": 14.0}
_RANK_S = {"golden": 1.5, "roundtrip": 8.0, "train": 5.0, "faults": 0.0}
"""Seconds of a cell of each kind on two cores, and of each further rank, for a tiny model and warm resources."""
_FIRST_OF_ITS_KIND = 3


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """Cells in the order in which they are run."""
    left, found, said, last = list(cells), list[Cell](), set[str](), ""
    while left:
        best = max(left, key=lambda cell: _worth(cell, said) / estimate_s(cell, last))
        left.remove(best)
        found.append(best)
        said |= _things(best)
        last = best.engine or last
    return found


def estimate_s(cell: Cell, last_engine: str = "") -> float:
    """Seconds that a cell is expected to take on warm resources, after a cell with another engine or none."""
    seconds = _CELL_S[cell.kind] + _RANK_S[cell.kind] * (ranks_of(cell.mesh) - 1)
    if cell.engine and cell.engine != last_engine:
        seconds += ENGINE_S[cell.engine.partition(",")[0]] * (2 if "tp=" in cell.engine else 1)
    return seconds


def ranks_of(mesh: str) -> int:
    """Ranks of the mesh with a label."""
    sizes = _sizes(mesh)
    return math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))


def _sizes(mesh: str) -> dict[str, int]:
    """Axis -> size, of a label such as "tp2 ep2"; those of size 1 are not in it."""
    return {axis: int(size) for axis, size in re.findall(r"\b([a-z]+)(\d+)\b", mesh)}


def _worth(cell: Cell, said: set[str]) -> float:
    new = _things(cell) - said
    weights = [_FIRST_OF_ITS_KIND if thing.startswith(("kind ", "model ")) and "/" not in thing else 1 for thing in new]
    return sum(weights) + 0.01


def _things(cell: Cell) -> set[str]:
    axes = [*(f"axis {name}" for name in _sizes(cell.mesh)), f"dtype {cell.dtype}", f"model {cell.model}"]
    named = (("engine", cell.engine), ("transport", cell.transport), ("algorithm", cell.algorithm))
    axes += [f"{name} {value}" for name, value in (*named, ("stage", cell.stage)) if value]
    kind = f"kind {cell.kind}"
    return {kind, *axes, *(f"{kind}/{axis}" for axis in axes)}
