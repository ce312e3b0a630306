"""WGT020 before the first step after a resume: what an engine gets, against what the checkpoint brought.

What this does not exercise: a real resume (tests/dist/test_train_resume.py), and a reference that is sent in the place
of the policy (tests/faults).
"""

from __future__ import annotations

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ONE_RANK, make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.record import TensorRecord
from verifier.stages.export.records import ExportedShard
from verifier.stages.load.records import LoadedShard
from verifier.stages.train.records import UpdatedShard


def shard(kind: type[TensorRecord], version: int, content: str) -> TensorRecord:
    own = {"coordinate": ""} | ({} if kind is ExportedShard else {"replica": "w"})
    return kind(name="w", version=version, digest="vd1:" + content * 32, dtype="float32", shape=(2,), **own)


@pytest.mark.parametrize(
    ("sent", "says", "verdict"),
    [("a", None, Verdict.HOLDS), ("b", "the live model after the load", Verdict.VIOLATED)],
)
def test_the_first_sync_after_a_resume_sends_what_was_loaded(sent: str, says: str | None, verdict: Verdict) -> None:
    records = [
        shard(LoadedShard, 4, "a"), shard(ExportedShard, 4, sent), shard(UpdatedShard, 5, "c"),
        shard(ExportedShard, 5, "c"),
    ]  # fmt: skip
    outcome = run_check(REGISTRY["WGT020"], make_trace(records, ONE_RANK))
    assert outcome.verdict is verdict
    if says is not None:
        assert outcome.finding is not None
        assert says in outcome.finding.first.expected


def test_a_sync_after_a_step_is_not_compared_with_the_load() -> None:
    records = [shard(LoadedShard, 0, "a"), shard(UpdatedShard, 1, "b"), shard(ExportedShard, 1, "a")]
    assert run_check(REGISTRY["WGT020"], make_trace(records, ONE_RANK)).verdict is Verdict.VIOLATED
