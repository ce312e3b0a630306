"""A resumed run: what its ranks hold is what was saved."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.content import compare_contents
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_trainer import LoadedState, SavedState
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("CKP001", needs=(SavedState, LoadedState), scope="resume")
def loaded_state_differs_from_saved(trace: Trace) -> Iterator[Comparison]:
    """After a resume every rank holds what it held when the checkpoint was saved, and the data go on where they were.

    What it checks: per rank, digests of weights, fp32 masters, Adam's moments and steps, the scheduler's count, and all
    random states, taken after the load, against those taken at the save; names both ways. The controller's position in
    the data, and the digest of all examples to train on, in order, too. Where trainer and engine take turns on a GPU,
    the same before and after each stay on the host.
    Why it matters: a resume that leaves moments out, builds masters from rounded weights, or begins a schedule anew
    trains on without an error, and no curve shows why it is worse.
    Evidence: checkpoint/saved, checkpoint/loaded.
    Tolerance and its source: bitwise; a load is a copy.
    What it does not catch: state that was wrong before it was saved (TRN001, TRN003), and a load on another mesh, which
    cuts tensors otherwise and is not compared.
    References: NeMo-RL#3171, SkyRL#1403, open-r1#450, slime#1152, VeOmni#330.
    """
    held = {(item.role, item.rank, item.version) for kind in (SavedState, LoadedState) for item in trace.of(kind)}
    for role, rank, version in sorted(held):
        loaded, saved = (
            [item for item in trace.of(kind, version=version, rank=rank) if item.role == role]
            for kind in (LoadedState, SavedState)
        )
        yield from compare_contents(
            loaded, saved, stage=Stage.CHECKPOINT, version=version, actual_says="what was loaded",
            expected_says="what was saved", allowed="bitwise (a load is a copy)",
            hint="look at what the load restores, and at what overwrites it before the first step",
        )  # fmt: skip
