"""State of a rank before a save and after a load, of a checkpoint or of a stay on the host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from verifier.core.record import Probe
from verifier.errors import UsageError
from verifier.stages.checkpoint.records import LoadedElements, LoadedState, SavedState, StateRecord
from verifier.trainer.state_megatron import Elements, Facts, saved_file

ABSENT = -1
"""Bits of an element that no rank saved."""


def record_loaded(
    probe: Probe, folder: Path, rank: int, coordinate: str, held: Facts, elements: Elements, *, same_mesh: bool
) -> None:  # fmt: skip
    """Record what was written into a checkpoint beside what a rank holds after it has loaded it.

    Of another mesh some elements are read, of all ranks, since no rank there held what this one does.

    Raises:
        UsageError: the checkpoint was written before ranks noted what they held.
    """
    others, version = sorted((folder / "saved").glob("*.elements.json")), int(folder.name)
    state = saved_file(folder, rank if same_mesh else rank % max(len(others), 1))
    wanted = state if same_mesh else state.with_suffix(".elements.json")
    if not wanted.exists():
        raise UsageError(
            f"the checkpoint `{folder}` is of an older version, without `saved/{wanted.name}`: leave --verify out"
        )
    if same_mesh:
        record_facts(probe, SavedState, msgspec.json.decode(state.read_bytes(), type=Facts), version)
        record_facts(probe, LoadedState, held, version)
    else:
        record_elements(probe, read_elements(others), elements, version, coordinate)


def record_facts(probe: Probe, kind: type[StateRecord], facts: Facts, version: int) -> None:
    """Record facts of the state that made a weight version."""
    for fact in facts:
        probe.emit(kind(version=version, **{**fact, "shape": tuple(fact["shape"])}))


def read_elements(files: Iterable[Path]) -> dict[str, dict[str, dict[int, int]]]:
    """Read what all ranks wrote: part -> tensor -> index -> bits; of copies the first one's."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    for file in files:
        for part, tensors in msgspec.json.decode(file.read_bytes(), type=Elements).items():
            for name, (indices, values) in tensors.items():
                own = found.setdefault(part, {}).setdefault(name, {})
                own.update(item for item in zip(indices, values, strict=True) if item[0] not in own)
    return found


def record_elements(
    probe: Probe, saved: dict[str, dict[str, dict[int, int]]], loaded: Elements, version: int, coordinate: str
) -> None:
    """Record what a rank holds after a load beside what was saved of the same elements, each part by itself."""
    for part in sorted(saved.keys() | loaded.keys()):
        own, all_saved = loaded.get(part, {}), saved.get(part, {})
        rows = [
            (index, all_saved.get(name, {}).get(index, ABSENT), bits)
            for name, (indices, values) in own.items() for index, bits in zip(indices, values, strict=True)
        ]  # fmt: skip
        columns = np.array(rows, np.int64).reshape(-1, 3)
        probe.emit(
            LoadedElements(
                name=part, version=version, coordinate=coordinate, tensors=tuple(own),
                counts=tuple(len(indices) for indices, _ in own.values()),
                saved_elements=sum(len(values) for values in all_saved.values()),
            ),
            dict(zip(("index", "saved", "loaded"), columns.T.copy(), strict=True)),
        )  # fmt: skip
