"""State that each rank held at a save, and how far it had trained, in the folder `saved` of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verifier.core.record import Count
from verifier.trainer.state_elements_megatron import Elements, write_elements
from verifier.trainer.state_megatron import Facts, write_facts


class Reached(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Point of the run at which a rank began a save, by its own count."""

    step: Count
    """Last step in which the rank took an update; 0 before the first."""
    optimizer_steps: Count


def write(folder: Path, rank: int, held: Facts, elements: Elements, reached: Reached) -> None:
    """Write what a rank holds, and how far it has trained, into a checkpoint."""
    state, file = files_of(folder, rank)
    write_facts(state, held)
    write_elements(state.with_suffix(".elements.json"), elements)
    file.write_bytes(msgspec.json.encode(reached))


def read_reached(file: Path) -> Reached:
    """Read how far a rank had trained."""
    return msgspec.json.decode(file.read_bytes(), type=Reached)


def trained_until(folder: Path) -> int:
    """Last step in which a checkpoint's rank 0 had taken an update when it began to save; 0 if not known."""
    _, file = files_of(folder, 0)
    return read_reached(file).step if file.exists() else 0


def files_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """Files of a rank in a checkpoint: digests of what it held, and how far it had trained."""
    own = folder / "saved" / f"{rank:04d}.json"
    return own, own.with_suffix(".reached.json")
