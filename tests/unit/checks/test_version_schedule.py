"""DAT015 on hand-written steps: versions of sampled tokens, at a start, after a step without an update.

What this does not exercise: real runs (tests/dist), and bugs that DAT015 catches (tests/faults).
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tests.snapshots.training_traces import training
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.data.checks_handed_on import version_of_other_weights
from verifier.stages.data.records import RequestSeeds, SamplingAsked
from verifier.stages.train.records import PreviousStep

STEP = 5
OF_KIND = {type(item): item for item in training()}


def wrong(
    mode: str, *versions: list[int], ids: tuple[str, ...] = ("5/0", "5/1"), updated: bool = True, begins: bool = False,
    steps: int | None = 2, weights: tuple[tuple[tuple[int, int], ...], ...] = (), sent: tuple[int, ...] = (3, 4),
) -> list[str]:  # fmt: skip
    """What is wrong with step 5, which trains version 4; each answer has a prompt of one token.

    Args:
        mode: of the run.
        versions: that each answer claims.
        ids: of the answers.
        updated: step 4 took an update.
        begins: step 5 is the first of its process.
        steps: after which new weights reach a batch.
        weights: that engines say they held for each answer; empty for a trace without.
        sent: versions that engines were sent last.
    """
    values = {"loss": 1.0} if updated else {"reward": 0.0}
    columns = [np.array([-1, *own], np.int32) for own in versions]
    records = [
        replace(OF_KIND[SamplingAsked], version=STEP, max_answer_tokens=6, sent=sent),
        RequestSeeds(
            name="round 0", version=STEP, round=0, turns=(), answers=ids, weights=(weights,) if weights else ()
        ),
        replace(
            OF_KIND[PolicyColumns], version=STEP, trained_version=STEP - 1, ids=ids[: len(columns)],
            lengths=tuple(map(len, columns)), array="policy",
        ),
        PreviousStep(name="step", version=STEP - 1, updated="loss" in values, here=not begins),
    ]  # fmt: skip
    config = {"grpo": {"mode": mode, "inflight_steps": steps}}
    trace = Trace(Manifest(complete=True, config=config), records, {"policy": {"version": np.concatenate(columns)}}.get)
    return [item.what for item in version_of_other_weights(trace) if not item.same]


@pytest.mark.parametrize(
    ("mode", "versions", "held"),
    [("sync", [4, 4], ((4, 2),)), ("async", [3, 3], ((3, 2),)), ("inflight", [3, 3, 4], ((3, 2), (4, 1)))],
)  # fmt: skip
def test_answers_claim_the_weights_that_their_engine_held(mode, versions, held):
    assert wrong(mode, versions, versions, weights=(held, held)) == []
    assert wrong(mode, versions, weights=((),)) == []  # of an engine that gets adapters


@pytest.mark.parametrize(
    ("mode", "versions", "held"),
    [
        ("sync", [4, 4], ((3, 2),)), ("sync", [4, 4], ((3, 1), (4, 1))), ("async", [3, 3], ((4, 2),)),
        ("inflight", [3, 3, 4], ((3, 1), (4, 2))), ("inflight", [3, 3, 4], ((3, 3),)), ("sync", [4, 4], ((4, 1),)),
        ("sync", [4, 4], ((4, 3),)),
    ],
)  # fmt: skip
def test_answers_that_other_weights_sampled_are_named(mode, versions, held):
    right = ((3, 2), (4, 1)) if mode == "inflight" else ((versions[0], len(versions)),)
    assert wrong(mode, versions, versions, weights=(right, held)) == ["weights of 5/1"]


def test_a_version_without_an_update_is_sampled_by_the_weights_that_were_sent_last():
    assert wrong("sync", [4, 4], updated=False, sent=(1, 2), weights=(((2, 2),),)) == []
    assert wrong("sync", [4, 4], updated=False, sent=(1, 2), weights=(((1, 2),),)) == ["weights of 5/0"]
    assert wrong("sync", [4, 4], updated=False, sent=(1, 2), weights=(((4, 2),),)) == ["weights of 5/0"]
    assert wrong("sync", [4, 4], sent=(1, 2), weights=(((2, 2),),)) == ["weights of 5/0"]  # never sent
    assert wrong("async", [3, 3], sent=(1, 4), weights=(((1, 2),),)) == []


def test_a_token_of_four_versions_before_that_claims_to_be_one_younger_is_named():
    sent = (0, 1, 2, 3, 4)
    assert wrong("async", [0, 0], sent=sent, weights=(((0, 2),),)) == []
    assert wrong("async", [1, 1], sent=sent, weights=(((0, 2),),)) == ["weights of 5/0"]
    assert wrong("inflight", [0, 1, 2, 4], sent=sent, weights=(((0, 1), (1, 2), (4, 1)),)) == ["weights of 5/0"]


def test_of_a_batch_from_before_a_resume_no_newer_weights_are_known():
    assert wrong("async", [3, 3], sent=(4,), begins=True, weights=(((3, 2),),)) == []
    assert wrong("async", [3, 3], sent=(4,), begins=True, weights=(((2, 2),),)) == []
    assert wrong("async", [3, 3], sent=(4,), begins=True, weights=(((4, 2),),)) == ["weights of 5/0"]
