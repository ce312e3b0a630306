"""What the launcher's errors say, whole."""

from __future__ import annotations

import pytest

from verifier.errors import ContractError, InternalError, UsageError
from verifier.launch.failures import CollectiveTimeout, JobTimeout, RankFailed, RankState, failure_from
from verifier.launch.job import innermost_frame

PLACES = [f"tp={rank % 2} pp={rank // 2}" for rank in range(4)]


def rank_report(**changes):
    report = {"kind": "rank", "rank": 3, "error": "ValueError", "message": "no", "cause": "ValueError: no"}
    return {**report, "traceback": "Traceback\n  here\n", "log_tail": "one\ntwo\n", **changes}


def test_rank_failed():
    error = failure_from(rank_report(), PLACES)
    assert isinstance(error, RankFailed)
    assert str(error) == (
        "rank 3 (tp=1 pp=1) failed: ValueError: no\n  Traceback\n    here\nlast lines of rank 3's log:\n  one\n  two"
    )
    assert str(failure_from(rank_report(traceback="", log_tail=""), [])) == "rank 3 failed: ValueError: no"


@pytest.mark.parametrize("kind", [UsageError, ContractError, InternalError])
def test_our_own_errors_keep_their_kind(kind):
    error = failure_from(rank_report(error=kind.__name__), PLACES)
    assert type(error) is kind
    assert str(error) == "no"
    assert isinstance(error.__cause__, RankFailed)


def test_collective_timeout():
    report = {
        "kind": "collective",
        "op": "all_reduce",
        "tensor": "`model.norm.weight` [64] float32",
        "group": [0, 1, 2, 3],
        "arrived": [0, 1, 2],
        "waited_s": 61.25,
        "states": [{"rank": 3, "doing": "in no collective yet", "frame": "train/step.py:7 in step"}],
    }
    error = failure_from(report, PLACES)
    assert isinstance(error, CollectiveTimeout)
    assert str(error) == (
        "all_reduce of `model.norm.weight` [64] float32 waited 61.2 s in a group of 4 ranks [0-3]: "
        "[0-2] arrived, [3] did not\n"
        "  rank 3 (tp=1 pp=1): in no collective yet, at train/step.py:7 in step"
    )


def test_collective_timeout_in_which_all_arrived():
    error = CollectiveTimeout(op="barrier", tensor="", group=[0, 2], arrived=[0, 2], missing=[], waited_s=5.0)
    assert str(error) == (
        "barrier waited 5.0 s in a group of 2 ranks [0, 2]: every rank arrived, yet it did not complete"
    )


def test_job_timeout_shows_eight_ranks():
    states = [RankState(rank=rank, place="", doing="in no collective yet") for rank in range(64)]
    lines = str(JobTimeout(function="m:f", deadline_s=300.0, states=states)).splitlines()
    assert lines[0] == "`m:f` did not end within its deadline of 300 s"
    assert lines[-2:] == ["  rank 7: in no collective yet", "  and 56 more ranks"]


def test_innermost_frame_that_is_the_callers():
    stack = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/env/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
        '  File "/src/verifier/launch/collectives.py", line 9 in watched\n'
        '  File "/src/verifier/export/gather_megatron.py", line 41 in export\n'
        '  File "/src/verifier/runs/roundtrip.py", line 1 in run\n'
    )
    assert innermost_frame(stack) == "export/gather_megatron.py:41 in export"
    assert innermost_frame("") == ""
