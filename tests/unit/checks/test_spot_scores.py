"""The rollout that a step scores by itself: which one it is, what it is held against, and within which bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.data.rollout import NO_VERSION, make_rollout
from verifier.oracle.oracle import Sides
from verifier.oracle.recording import sampled_noise
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.logprob.probe_spot_scores import EVERY, beginning_of, place_of
from verifier.stages.logprob.records import SpotScore
from verifier.stages.loss.records import LossRows

IDS, LENGTHS, SEED = tuple("abcdefg"), (9, 7, 8, 6, 9, 7, 8), 11
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])
NATS = -np.random.default_rng(3).uniform(0.5, 4.0, (2, sum(LENGTHS)))
"""Log-probabilities of all tokens: by the live weights, and by the reference."""
Arrays = dict[str, dict[str, np.ndarray]]


def parts_of(mini_batches: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(len(IDS)), mini_batches)]


def spot_of(step: int, mini_batches: int, arrays: Arrays, **changed: Any) -> SpotScore:
    """Record of the rollout that the trainer chooses."""
    place = place_of(SEED, step, parts_of(mini_batches))
    own = slice(STARTS[place] + 1, STARTS[place + 1])
    arrays["spot"] = {name: NATS[at, own].astype(np.float32) for at, name in enumerate(("current", "reference"))}
    fields: dict[str, Any] = {"id": IDS[place], "seed": SEED, "step": step, "mini_batches": mini_batches, **changed}
    return SpotScore(name="spot", version=step, array="spot", **fields)


def policy(
    step: int = 1, mini_batches: int = 2, dtype: str = "float32", name: str = "reference", **spot: Any
) -> tuple[list[Record], Arrays, Manifest]:
    """A step of seven rollouts with a reference, all right."""
    old, reference = NATS.astype(np.float32)
    arrays: Arrays = {"policy": {"old": old.copy(), name: reference.copy(), "own": np.ones(len(old), bool)}}
    arrays["policy"]["own"][STARTS[:-1]] = False
    for column in ("old", name):
        arrays["policy"][column][STARTS[:-1]] = np.nan
    given = PolicyColumns(
        name="policy inputs", version=step, ids=IDS, lengths=LENGTHS, ratio_over="old", weight_level="", weight_cap=2.0,
        max_staleness=0, trained_version=step - 1, array="policy",
    )  # fmt: skip
    seen = [given, spot_of(step, mini_batches, arrays, **spot)]
    return seen, arrays, Manifest(dtype=dtype, model="tiny:add", complete=True)


def judged(seen: list[Record], arrays: Arrays, manifest: Manifest) -> Outcome:
    return run_check(REGISTRY["LGP013"], Trace(manifest, seen, arrays.__getitem__))


def sft(step: int = 1) -> tuple[list[Record], Arrays, Manifest]:
    """A step of fine-tuning on seven samples, whose rows two context-parallel ranks hold in turn."""
    rollout = np.repeat(np.arange(len(IDS)), LENGTHS)
    position = np.arange(len(rollout)) - STARTS[rollout]
    predicted = position > 0
    sentinel = ((rollout + 1) << 32 | position)[predicted]
    arrays: Arrays = {
        f"rows {rank}": {
            "sentinel": np.append(sentinel[rank::2], 0),
            "current": np.append(NATS[0, predicted][rank::2], 9.0).astype(np.float32),
        }
        for rank in range(2)
    }
    columns = LossColumns(
        name="update 5", version=step, aggregation="token_mean", ids=IDS, groups=IDS, lengths=LENGTHS, array="columns"
    )
    rows = [
        LossRows(name="update 5", version=step, rank=rank, coordinate="", array=f"rows {rank}") for rank in range(2)
    ]
    return (
        [columns, *rows, spot_of(step, 1, arrays)],
        arrays,
        Manifest(dtype="float32", model="tiny:add", complete=True),
    )


@pytest.mark.parametrize("step", [1, 9, 17, 25, 33])
@pytest.mark.parametrize("mini_batches", [1, 2, 3])
def test_the_rollout_is_the_one_that_the_check_names_too(step: int, mini_batches: int) -> None:
    found = judged(*policy(step, mini_batches))
    assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, 3, None)


def test_mini_batches_have_their_turn_from_the_last_on() -> None:
    parts = parts_of(3)
    chosen = [place_of(SEED, step, parts) for step in range(1, 49, EVERY)]
    assert [next(at for at, part in enumerate(parts) if place in part) for place in chosen] == [2, 1, 0, 2, 1, 0]
    assert len({place_of(SEED, step, [range(64)]) for step in range(1, 321, EVERY)}) > 20


def test_another_rollout_than_the_rule_names_shows() -> None:
    chosen = IDS[place_of(SEED, 1, parts_of(2))]
    other = next(name for name in IDS if name != chosen)
    assert judged(*policy(id=other)).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("column", ["old", "reference", "penalty_reference"])
@pytest.mark.parametrize("off", [2e-4, np.nan])
def test_values_of_another_pass_show(column: str, off: float) -> None:
    seen, arrays, manifest = policy(name=column if column != "old" else "reference")
    place = place_of(SEED, 1, parts_of(2))
    arrays["policy"][column][STARTS[place] + 3] += off
    found = judged(seen, arrays, manifest)
    assert found.verdict is Verdict.VIOLATED
    assert found.finding is not None
    assert column.removeprefix("penalty_") in found.finding.bad[0].sentence


def test_rounding_holds_and_a_low_temperature_allows_more() -> None:
    for off, temperature, holds in ((5e-5, 1.0, True), (2e-4, 0.25, True), (5e-4, 0.25, False)):
        seen, arrays, manifest = policy(temperature=temperature)
        arrays["policy"]["old"] += np.float32(off)
        assert (judged(seen, arrays, manifest).verdict is Verdict.HOLDS) is holds


def test_rows_of_the_loss_are_held_against_it_too() -> None:
    seen, arrays, manifest = sft()
    found = judged(seen, arrays, manifest)
    assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, 3, None)
    place = place_of(SEED, 1, parts_of(1))
    rows = arrays["rows 1"]
    rows["current"][np.flatnonzero(rows["sentinel"] >> 32 == place + 1)[0]] += 0.01
    found = judged(seen, arrays, manifest)
    assert found.verdict is Verdict.VIOLATED
    assert found.finding is not None
    assert "the loss of update 5 on rank 1" in found.finding.bad[0].sentence


@pytest.mark.parametrize(("off", "verdict"), [(0.04, Verdict.HOLDS), (0.5, Verdict.VIOLATED)])
def test_in_bf16_old_is_held_against_the_noise_of_sampled_steps(off: float, verdict: Verdict) -> None:
    seen, arrays, manifest = policy(dtype="bfloat16")
    exact = -np.random.default_rng(5).uniform(0.5, 4.0, 200)
    noise = np.random.default_rng(6).normal(0.0, 0.01, 200)
    seen.append(sampled_noise(1, 0, Sides([exact], [exact + noise], [])))
    arrays["policy"]["old"] += np.float32(off)
    arrays["policy"]["reference"] += np.float32(9)  # of other weights than the noise
    found = judged(seen, arrays, manifest)
    assert (found.verdict, found.num_compared, found.error) == (verdict, 2, None)


@pytest.mark.parametrize(("off", "verdict"), [(0.04, Verdict.HOLDS), (0.06, Verdict.VIOLATED)])
def test_in_bf16_without_noise_the_mean_is_judged(off: float, verdict: Verdict) -> None:
    seen, arrays, _ = sft()
    for rank in range(2):
        arrays[f"rows {rank}"]["current"] += np.float32(off)
    found = judged(seen, arrays, Manifest(dtype="bfloat16", complete=True))
    assert (found.verdict, found.num_compared, found.error) == (verdict, 3, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("off", "verdict"), [(0.0, Verdict.HOLDS), (0.1, Verdict.VIOLATED), (np.nan, Verdict.VIOLATED)]
)
def test_a_token_that_depends_on_later_ones_shows(dtype: str, off: float, verdict: Verdict) -> None:
    seen, arrays, _ = sft()
    arrays["spot"]["beginning"] = arrays["spot"]["current"][:3] + np.float32(off)
    found = judged(seen, arrays, Manifest(dtype=dtype, model="tiny:add", complete=True))
    assert (found.verdict, found.num_compared, found.error) == (verdict, 4, None)
    assert found.finding is None or "its beginning by itself" in found.finding.bad[0].sentence


def test_a_beginning_ends_within_the_answer_and_leaves_a_token() -> None:
    for prompt, answer in ((4, [5, 6, 7]), (3, [5]), (4, [])):
        rollout = make_rollout("a", range(prompt), answer, sampled=[True] * len(answer), versions=NO_VERSION)
        found = beginning_of(rollout)
        assert prompt - 1 <= len(found) < len(rollout)
        assert found.prompt_length == min(prompt, len(found))
        assert found.tokens.tolist() == rollout.tokens[: len(found)].tolist()
