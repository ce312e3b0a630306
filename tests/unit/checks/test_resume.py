"""CKP001 on another mesh: elements of a state."""

from __future__ import annotations

import numpy as np

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.checkpoint.records import LoadedElements, LoadedState, SavedState

BITS = np.array([1.0, -2.0, 0.5], np.float32).view(np.uint32).astype(np.int64)


def on_another_mesh(loaded: np.ndarray, *, saved: np.ndarray = BITS, num_saved: int = 5) -> tuple[Verdict, list[str]]:
    """Elements 0 to 2 of `a` on rank 0 and the others of its moment, 3 and 4, on rank 1, which are right."""
    row = {"dtype": "int64", "shape": (), "digest": "vd1:0", "coordinate": "", "version": 3, "name": "scheduler/steps"}
    arrays = {
        "rank 0": {"index": np.arange(3), "saved": saved, "loaded": loaded},
        "rank 1": {"index": np.arange(3, 5), "saved": BITS[:2], "loaded": BITS[:2]},
    }
    records: list[Record] = [SavedState(role="controller", **row), LoadedState(role="controller", **row)]
    for rank, counts in enumerate(((3,), (2,))):
        records.append(
            LoadedElements(
                name="exp_avg", version=3, rank=rank, coordinate="", tensors=("a",), counts=counts,
                saved_elements=num_saved, array=f"rank {rank}",
            )
        )  # fmt: skip
    trace = Trace(Manifest(complete=True), records, lambda key: arrays[key])
    outcome = run_check(REGISTRY["CKP001"], trace)
    assert outcome.error is None
    return outcome.verdict, [item.sentence for item in outcome.finding.bad] if outcome.finding else []


def test_elements_of_another_mesh_hold() -> None:
    assert on_another_mesh(BITS) == (Verdict.HOLDS, [])


def test_an_element_of_other_bits_is_seen() -> None:
    verdict, said = on_another_mesh(np.array([*BITS[:2], 0]))
    assert verdict is Verdict.VIOLATED
    assert said == [
        "element 2 of exp_avg of `a` is 0 (after the load; 1 of 3 elements differ), it should be 0.5 (when it "
        "was saved)"
    ]


def test_an_element_that_nobody_saved_is_seen() -> None:
    verdict, said = on_another_mesh(BITS, saved=np.array([-1, *BITS[1:]]), num_saved=4)
    assert verdict is Verdict.VIOLATED
    assert said == [
        "element 0 of exp_avg of `a` is 1 (after the load; 1 of 3 elements differ), it should be nothing (when "
        "it was saved)"
    ]


def test_elements_that_no_rank_holds_are_missed() -> None:
    verdict, said = on_another_mesh(BITS, num_saved=6)
    assert verdict is Verdict.VIOLATED
    assert said == ["the number of elements of exp_avg that ranks hold is 5, it should be 6 (what was saved)"] * 2
