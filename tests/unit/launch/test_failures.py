"""What the launcher's errors say, whole."""

from __future__ import annotations

import json

import pytest

from verifier.errors import ContractError, InternalError, UsageError
from verifier.launch.failures import (
    CollectiveTimeout,
    JobTimeout,
    RankFailed,
    RankState,
    Stall,
    error_from,
    known_error,
    to_record,
)
from verifier.launch.watchdog import innermost_frame, is_whole


def test_rank_failed():
    error = RankFailed(
        rank=3, place="tp=1 pp=1", cause="ValueError: no", traceback="Traceback\n  here\n", log_tail="one\ntwo\n"
    )
    assert str(error) == (
        "rank 3 (tp=1 pp=1) failed: ValueError: no\n  Traceback\n    here\nlast lines of rank 3's log:\n  one\n  two"
    )
    bare = RankFailed(rank=3, place="", cause="ValueError: no", traceback="", log_tail="")
    assert str(bare) == "rank 3 failed: ValueError: no"


@pytest.mark.parametrize("kind", [UsageError, ContractError, InternalError])
def test_our_own_errors_cross_as_themselves(kind):
    error = error_from(json.loads(json.dumps(to_record(kind("no")))), "it failed")
    assert (type(error), str(error)) == (kind, "no")


def test_a_kind_of_ours_that_is_not_known_there_crosses_as_its_base():
    assert type(known_error(to_record(RankRefused("no")))) is ContractError


def test_other_errors_cross_with_their_cause_and_traceback():
    record = to_record(ValueError("no such expert"))
    assert known_error(record) is None
    assert str(error_from(record, "it failed")).splitlines()[0] == "it failed: ValueError: no such expert"
    assert to_record(SystemExit(3))["cause"] == "SystemExit: 3"


class RankRefused(ContractError):
    """A kind that only its own process knows."""


def test_collective_timeout():
    missing = RankState(rank=3, place="tp=1 pp=1", doing="in no collective yet", frame="train/step.py:7 in step")
    stall = Stall(
        op="all_reduce", tensor="`model.norm.weight` [64] float32", group=(0, 1, 2, 3), arrived=(0, 1, 2), missing=(3,),
        waited_s=61.25,
    )  # fmt: skip
    assert str(CollectiveTimeout(stall, [missing])) == (
        "all_reduce of `model.norm.weight` [64] float32 waited 61.2 s in a group of 4 ranks [0-3]: "
        "[0-2] arrived, [3] did not\n"
        "  rank 3 (tp=1 pp=1): in no collective yet, at train/step.py:7 in step"
    )


def test_collective_timeout_in_which_all_arrived():
    stall = Stall(op="barrier", tensor="", group=(0, 2), arrived=(0, 2), missing=(), waited_s=5.0)
    assert str(CollectiveTimeout(stall, [])) == (
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


def test_a_dump_is_whole_at_its_outermost_frame():
    stack = (
        "Stack (most recent call first):\n"
        '  File "/src/verifier/export/gather_megatron.py", line 41 in export\n'
        '  File "/src/verifier/launch/child.py", line 149 in boot\n'
        '  File "<string>", line 1 in <module>\n'
    )
    assert [end for end in range(len(stack) + 1) if is_whole(stack[:end])] == [len(stack)]
    assert is_whole(stack.replace('  File "<string>", line 1 in <module>', "  ..."))
