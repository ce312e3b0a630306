"""What the checks of delivery take for wrong, beside what the snapshots show."""

from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, MANIFEST, clean, tensor
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.records_weights import ColdTensor, SyncedTensor
from verifier.core.trace import Trace


def test_buffers_of_one_name_are_compared_one_by_one() -> None:
    """Version 2 has no cold engine, so its buffers are held against those of version 1."""
    twice, first = (
        [replace(tensor(kind, "b", 1, role=role, sort="buffer"), name="rotary.inv_freq") for _ in range(2)]
        for kind, role in ((ColdTensor, "cold"), (SyncedTensor, "engine"))
    )
    held = [*first, *(replace(item, version=2) for item in first)]
    for state, verdict in ((held, Verdict.HOLDS), (held[:3], Verdict.VIOLATED)):
        records = [item for item in clean() if not isinstance(item, (ColdTensor, SyncedTensor))]
        outcome = run_check(REGISTRY["ENG002"], Trace(MANIFEST, [*records, *twice, *state], ARRAYS.__getitem__))
        assert outcome.verdict is verdict
