"""DAT014 on hand-written steps: answers as the engine gave them.

What this does not exercise: real runs, with several turns and rounds (tests/dist), and bugs (tests/faults).
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.training_traces import training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import ONLY
from verifier.core.seal import NO_SEAL, seal_of_array
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.data.records import EpisodeTurns, RequestSeeds
from verifier.stages.pack.records import Rollouts
from verifier.stages.replay.records import GivenRoutes

VERSIONS = np.array([-1, 0, 0, -1, 1, 1, -1, 0], np.int32)
"""Episode `a` of two turns, with a reply of one token between them, and `b` of one."""
NATS = np.array([np.nan, -1, -2, np.nan, -3, -4, np.nan, -5], np.float32)
TOKENS = np.array([9, 1, 2, 8, 3, 4, 9, 5], np.int64)


def sealed(*places: int) -> tuple[int, int]:
    at = list(places)
    return seal_of_array(TOKENS[at]), seal_of_array(NATS[at])


def judged(
    tokens: np.ndarray = TOKENS, nats: np.ndarray = NATS, versions: np.ndarray = VERSIONS, step_wise: bool = False,
    seals: tuple[tuple[tuple[int, int], ...], ...] = ((sealed(1, 2), sealed(7)), (sealed(4, 5),)),
) -> tuple[Verdict, str, int]:  # fmt: skip
    ids, lengths = (("a/0", "a/1", "b/0"), (3, 3, 2)) if step_wise else (("a", "b"), (6, 2))
    of_kind = {type(item): item for item in training()}
    records = [
        replace(of_kind[RequestSeeds], turns=(), seals=seals, answers=("a", "b")),
        replace(of_kind[EpisodeTurns], episodes=("a", "a", "b"), indices=(0, 1, 0), step_wise=step_wise),
        replace(of_kind[PolicyColumns], ids=ids, lengths=lengths, array="policy"),
        Rollouts(
            name="trained", version=1, ids=ids, groups=("g",) * len(ids), lengths=lengths,
            prompt_lengths=(1,) * len(ids), rewards=(0.0,) * len(ids), array="rollouts",
        ),
    ]  # fmt: skip
    arrays = {"policy": {"version": versions, "engine": nats}, "rollouts": {"versions": versions, "tokens": tokens}}
    outcome = run_check(REGISTRY["DAT014"], Trace(Manifest(), records, arrays.__getitem__))
    first = outcome.finding.first if outcome.finding else None
    return outcome.verdict, first.what if first else "", first.version if first else outcome.num_compared


@pytest.mark.parametrize("step_wise", [False, True])
def test_answers_as_they_came(step_wise):
    assert judged(step_wise=step_wise) == (Verdict.HOLDS, "", 6)


@pytest.mark.parametrize("step_wise", [False, True])
def test_the_version_of_a_finding_is_that_of_the_tokens(step_wise):
    """So that it comes before what other checks say of the same numbers."""
    other = NATS + np.float32(2**-10) * (VERSIONS == 1)
    assert judged(nats=other, step_wise=step_wise) == (Verdict.VIOLATED, "log-probabilities of turn 1 of a", 1)


def test_a_token_is_seen():
    assert judged(tokens=TOKENS + (np.arange(8) == 7)) == (Verdict.VIOLATED, "token ids of b", 0)


def test_replies_are_not_of_the_engine():
    assert judged(tokens=TOKENS + (np.arange(8) == 3))[0] is Verdict.HOLDS


def test_a_reply_that_counts_as_sampled_is_seen():
    assert judged(versions=np.where(np.arange(8) == 3, 0, VERSIONS))[:2] == (Verdict.VIOLATED, "token ids of a")


def test_an_answer_that_nobody_gave_is_seen():
    assert judged(seals=((sealed(1, 2), sealed(7)), ()))[1] == "log-probabilities of turn 1 of a"


def test_without_seals_nothing_is_said():
    """As after a resume of a run that kept none."""
    assert judged(seals=())[0] is Verdict.INCONCLUSIVE


ROUTED = [np.arange(count * 6, dtype=np.int32).reshape(count, 3, 2) % 7 for count in (5, 5, 4)]
"""[tokens, layers, experts per token] of three answers; the routers' layers are 1, 2 and 4."""


def routed(given: list[np.ndarray], known: tuple[int, ...] | None = None) -> tuple[Verdict, str, int]:
    seals = tuple(map(seal_of_array, ROUTED)) if known is None else known
    one, ids = (seal_of_array(TOKENS[[1]]), seal_of_array(NATS[[1]])), ("a", "b", "c")
    rows = [
        [at, token, layer, *routes[token, column]]
        for at, routes in enumerate(given)
        for token in range(len(routes))
        for column, layer in enumerate((1, 2, 4))
        if routes[token, column, 0] >= 0
    ]
    of_kind = {type(item): item for item in training()}
    records = [
        replace(of_kind[RequestSeeds], turns=(), seals=((one,) * 3,), routes=(seals,) if seals else (), answers=ids),
        replace(of_kind[PolicyColumns], ids=ids, lengths=(1, 1, 1), array="policy"),
        GivenRoutes(name="batch", version=1, rollouts=ids, array="routes"),
    ]
    columns = {"version": np.zeros(3, np.int32), "engine": np.full(3, NATS[1])}
    arrays = {"policy": columns, "routes": {ONLY: np.array(rows)}}
    outcome = run_check(REGISTRY["DAT014"], Trace(Manifest(), records, arrays.__getitem__))
    first = outcome.finding.first if outcome.finding else None
    assert first is None or (first.stage, first.version) == (Stage.DATA, 0)
    return outcome.verdict, first.what if first else "", outcome.num_compared


def test_routes_as_they_came():
    """The last token has none, whether the batch has a row for it or not."""
    ended = [np.concatenate([each, np.full((1, 3, 2), -1, np.int32)]) for each in ROUTED]
    assert routed(ROUTED) == routed(ended) == (Verdict.HOLDS, "", 6)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ([ROUTED[1][:, :, ::-1], *ROUTED[1:]], "routes of a"),
        ([ROUTED[0], np.roll(ROUTED[1], 1, axis=0), ROUTED[2]], "routes of b"),
        ([ROUTED[0], np.concatenate([np.full((1, 3, 2), -1, np.int32), ROUTED[1]]), ROUTED[2]], "routes of b"),
        ([*ROUTED[:2], ROUTED[2][:-1]], "routes of c"),
        ([*ROUTED[:2], ROUTED[2][:, [1, 0, 2]]], "routes of c"),
        ([*ROUTED[:2], ROUTED[2] + (np.arange(24).reshape(4, 3, 2) == 23)], "routes of c"),
        ([ROUTED[0], ROUTED[2], ROUTED[1]], "routes of b"),
    ],
    ids=["in another order", "late", "one more before", "cut", "layers exchanged", "one id", "exchanged"],
)
def test_other_routes_are_seen(changed, first):
    assert routed(changed)[:2] == (Verdict.VIOLATED, first)


@pytest.mark.parametrize("known", [(NO_SEAL,) * 3, ()])
def test_without_seals_of_routes_nothing_is_said_of_them(known):
    assert routed(ROUTED[::-1], known) == (Verdict.HOLDS, "", 3)
