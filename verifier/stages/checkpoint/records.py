"""Records of the stage `checkpoint`: state of a run to files, and back."""

from __future__ import annotations

from verifier.core.owed import Owed, every_rank, once
from verifier.core.record import ArrayRecord, Count, Lengths, RankArrays, TensorRecord


class StateRecord(TensorRecord, frozen=True, kw_only=True):
    """One tensor, counter or random state of a run: "weight/...", "optimizer/...", "scheduler/...", "rng/..."."""

    coordinate: str
    """Mesh coordinate of the rank; empty for the run's own state."""


class SavedState(StateRecord, frozen=True, kw_only=True, tag="checkpoint/saved"):
    """State that a rank held when the checkpoint was saved."""

    owed = (Owed(every_rank, once),)


class LoadedState(StateRecord, frozen=True, kw_only=True, tag="checkpoint/loaded"):
    """State that a rank holds after the checkpoint was loaded, before the next step."""

    owed = (Owed(every_rank, once),)


class LoadedElements(RankArrays, frozen=True, kw_only=True, tag="checkpoint/elements"):
    """Elements of one part of a rank's state after a load on another mesh, by tensors of the checkpoint.

    Arrays, int64, of all tensors one after another: ``index`` in the flattened tensor; ``loaded`` the bits of float32
    there, or a count; ``saved`` those that any rank saved, -1 where none did.
    """

    tensors: tuple[str, ...]
    counts: Lengths
    """Elements of each tensor."""
    saved_elements: Count
    """Elements of this part that all ranks saved together."""


class WrittenTensors(ArrayRecord, frozen=True, kw_only=True, tag="checkpoint/written"):
    """Elements of tensors that one rank gave to be written into a checkpoint, and of what its files have then.

    Arrays, int64, the bits of all tensors one after another: ``given``, and ``written`` of those that are found.
    """

    owed = (Owed(every_rank, once),)

    tensors: tuple[str, ...]
    """Name of each in the checkpoint."""
    counts: Lengths
    """Elements of each that were given."""
    found: Lengths
    """Elements of each that are in the files: as many, or none where it is not there."""

    @property
    def party(self) -> tuple[str, int]:
        """The trainer rank, which the name tells."""
        return "trainer", int(self.name.rpartition(" ")[2])
