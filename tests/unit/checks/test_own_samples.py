"""PCK001 of rollouts that are samples of the engine: what the run says of them is what the engine sampled."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from tests.snapshots.check_traces import MANIFEST
from tests.snapshots.token_arrays import LEDGER
from verifier.core.manifest import MeshSizes
from verifier.core.record import ONLY
from verifier.core.trace import Trace
from verifier.data.recorded import RolloutRow
from verifier.runs.workload import Answer, expected_rollouts, rollouts_of, with_answers
from verifier.stages.pack.checks_packing import token_misplaced
from verifier.stages.pack.probe_tokens import record_of_rollouts
from verifier.stages.pack.records import TokenLedger
from verifier.stages.rollout.records import SampledTokens

PROMPT, TOKENS, LOGPROBS = (5, 6, 7), (8, 9), (-0.5, -1.25)
ANSWER = Answer(id="sampled at length 1", prompt=PROMPT, tokens=TOKENS, logprobs=LOGPROBS)
MADE_UP = [
    RolloutRow(
        id=f"sequence {index}", group="g", prompt=(1, 2), response=(3,), sampled=(True,), mask=(True,),
        logprobs=(-1.0,), versions=(0,), reward=float(index),
    )
    for index in range(3)
]  # fmt: skip
SAMPLED = SampledTokens(
    name="sampled at length", version=1, lengths=(1, 2), prompts=(PROMPT, PROMPT), tokens=((4,), TOKENS),
    stops=((), ()), limits=(1, 2), ended=("length", "length"), temperatures=(1.0, 1.0), array="sampled",
)  # fmt: skip


def found(answer: Answer, version: int = 1, **changed) -> list[str]:
    """What PCK001 finds of the rollouts of a step to version 2; the ledger is another batch's."""
    first, own, *others = with_answers(MADE_UP, [answer], version)
    rollouts = expected_rollouts([first, replace(own, **changed), *others])
    record, columns = record_of_rollouts("trained", 2, rollouts)
    ledger = TokenLedger(name="trained", version=2, coordinate="tp=0", array="ledger")
    arrays = {"tokens": columns, "ledger": LEDGER, "sampled": {ONLY: np.array([-2.0, *LOGPROBS], np.float32)}}
    records = [replace(record, array="tokens"), ledger, SAMPLED]
    compared = token_misplaced(Trace(replace(MANIFEST, mesh=MeshSizes()), records, arrays.__getitem__))
    return [item.sentence for item in compared if not item.same and "engine sampled" in item.sentence]


def test_what_the_engine_sampled_is_right():
    assert found(ANSWER) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"tokens": (9, 8)}, "tokens"),
        ({"prompt": (5, 6)}, "tokens, log-probabilities"),
        ({"logprobs": (-1.25, -0.5)}, "log-probabilities"),
        ({"logprobs": (-0.5, -1.2500002)}, "log-probabilities"),
        ({"tokens": (8, 9, 0), "logprobs": (*LOGPROBS, 0.0)}, "tokens, log-probabilities"),
    ],
)
def test_another_answer_is_found(wrong, field):
    said = f"rollout `{ANSWER.id}` is not what the engine sampled: {field}"
    assert found(replace(ANSWER, **wrong)) == [said]


def test_another_version_is_found():
    assert found(ANSWER, version=0) == [f"rollout `{ANSWER.id}` is not what the engine sampled: weight version"]


def test_an_answer_that_is_not_trained_on_whole_is_found():
    assert found(ANSWER, mask=(True, False)) == [f"rollout `{ANSWER.id}` is not what the engine sampled: mask"]


def test_an_answer_takes_the_place_of_the_second_rollout_and_keeps_its_reward():
    rows = with_answers(MADE_UP, [ANSWER], 1)
    assert [row.id for row in rows] == ["sequence 0", ANSWER.id, "sequence 2"]
    assert (rows[1].reward, rows[1].group, rows[1].tokens) == (1.0, "g", [*PROMPT, *TOKENS])
    (_, made, _), (_, expected, _) = rollouts_of(rows), expected_rollouts(rows)
    assert made.logprobs.tolist()[3:] == expected.logprobs.tolist()[3:] == list(LOGPROBS)
    assert math.isnan(made.logprobs[0])


def test_a_batch_of_one_has_no_place_for_an_answer():
    assert with_answers(MADE_UP[:1], [ANSWER], 1) == tuple(MADE_UP[:1])
