"""State that each rank held at a save, in the folder `saved` of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from verifier.trainer.state_megatron import Elements, Facts, write_elements, write_facts


def write(folder: Path, rank: int, held: Facts, elements: Elements) -> None:
    """Write what a rank holds into a checkpoint."""
    state = file_of(folder, rank)
    write_facts(state, held)
    write_elements(state.with_suffix(".elements.json"), elements)


def file_of(folder: Path, rank: int) -> Path:
    """File of a rank in a checkpoint: digests of what it held."""
    return folder / "saved" / f"{rank:04d}.json"
