"""Rows of scoring passes against what the policy loss reads: every token's own, of one rank, whatever the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.logprob.records import ScoredRows
from verifier.stages.pack.checks_packing import POSITION_BITS

IDS, LENGTHS = ("a", "b", "c"), (4, 3, 5)
STARTS = np.cumsum([0, *LENGTHS])
NATS = -np.random.default_rng(5).uniform(0.5, 4.0, (2, sum(LENGTHS))).astype(np.float32)
"""Log-probabilities of all tokens: by the live weights, and by the reference."""
TOKENS = [(at, position) for at, length in enumerate(LENGTHS) for position in range(1, length)]


def judged(shares: list[list[tuple[int, int]]], column: str = "reference", **changed: Any) -> Outcome:
    """Judge a step whose tokens, as (rollout, position), two passes scored on ranks with these shares."""
    old, reference = NATS.copy()
    old[STARTS[:-1]] = reference[STARTS[:-1]] = np.nan
    arrays = {"policy": {"old": old, column: reference} | changed}
    seen: list[Any] = [
        PolicyColumns(
            name="policy inputs", version=2, ids=IDS, lengths=LENGTHS, ratio_over="old", weight_level="",
            weight_cap=2.0, max_staleness=0, trained_version=1,
            array="policy",
        )
    ]  # fmt: skip
    for side, which in enumerate(("current", "reference")):
        for rank, share in enumerate(shares):
            name = f"{which} {rank}"
            place = [STARTS[at] + position for at, position in share]
            sentinel = np.array([(at + 1) << POSITION_BITS | position for at, position in share], np.int64)
            arrays[name] = {"sentinel": sentinel, "logprob": NATS[side][place]}
            seen.append(ScoredRows(name=name, version=2, which=which, ids=IDS, coordinate=f"dp={rank}", array=name))
    return run_check(REGISTRY["LGP017"], Trace(Manifest(dtype="float32", complete=True), seen, arrays.__getitem__))


@pytest.mark.parametrize("column", ["reference", "penalty_reference"])
@pytest.mark.parametrize("order", [TOKENS, TOKENS[::-1], [*TOKENS[3:], *TOKENS[:3]]])
def test_rows_of_any_order_on_any_rank_hold(order, column):
    for cut in (0, 4, len(order)):
        assert judged([order[:cut], order[cut:]], column).verdict is Verdict.HOLDS


@pytest.mark.parametrize("column", ["old", "reference", "penalty_reference"])
def test_a_value_of_a_neighbour_is_seen(column):
    moved = NATS[0 if column == "old" else 1].copy()
    moved[[1, 5]] = moved[[5, 1]]
    outcome = judged([TOKENS], "reference" if column == "old" else column, **{column: moved})
    assert outcome.verdict is Verdict.VIOLATED
    assert {item.what for item in outcome.finding.bad} == {f"{column} of a", f"{column} of b"}


def test_a_last_bit_is_seen():
    rounded = NATS[1].copy()
    rounded[2] = np.nextafter(rounded[2], np.float32(0))
    assert judged([TOKENS], reference=rounded).verdict is Verdict.VIOLATED


def test_a_token_that_no_rank_or_two_scored_is_seen():
    assert judged([TOKENS[1:]]).verdict is Verdict.VIOLATED
    outcome = judged([TOKENS, TOKENS[:1]])
    assert outcome.verdict is Verdict.VIOLATED
    assert "not one rank scored it" in outcome.finding.bad[0].sentence


def test_a_pass_over_other_rollouts_is_seen():
    arrays = {
        "policy": {"old": NATS[0]},
        "rows": {"sentinel": np.array([1 << POSITION_BITS | 1]), "logprob": NATS[0][:1]},
    }
    policy = PolicyColumns(
        name="policy inputs", version=2, ids=("a",), lengths=(1,), ratio_over="old", weight_level="", weight_cap=2.0,
        max_staleness=0, trained_version=1, array="policy",
    )  # fmt: skip
    other = ScoredRows(name="current", version=2, which="current", ids=("z",), coordinate="dp=0", array="rows")
    trace = Trace(Manifest(dtype="float32", complete=True), [policy, other], arrays.__getitem__)
    assert run_check(REGISTRY["LGP017"], trace).verdict is Verdict.VIOLATED
