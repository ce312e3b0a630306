"""What bf16 log-probabilities may differ by: a stored floor where there is one, else what the run measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.logprob.checks_logprobs import Bounds, bounds_of, trainer_logprob_differs_from_oracle
from verifier.stages.logprob.records import DtypeNoise, EngineNoise, OracleLogprobs, StoredFloor, TrainerLogprobs
from verifier.stages.replay.records import GivenRoutes

REST = {"tokens": 100, "p90": 0.0, "p99": 0.0}
SHORT = StoredFloor(
    name="short", longest=64, mean=0.01, deviation=0.02, median=0.008, greatest=0.1, stored="short", **REST
)
LONG = StoredFloor(
    name="long", longest=256, mean=0.02, deviation=0.01, median=0.009, greatest=0.3, stored="long", **REST
)
NOISE = DtypeNoise(name="scored", version=1, greatest=0.07, mean=0.012, deviation=0.03)
LENGTHS = (60, 200)


def bounds(run: Trace, stage: Stage, whole: list[int], lengths: tuple[int, ...] = LENGTHS) -> Bounds:
    return bounds_of(run, stage, "scored", 1, lengths, whole)


def trace(*more: Record, dtype: str = "bfloat16", gaps: torch.Tensor | None = None, temperature: float = 1.0) -> Trace:
    """A run with two sequences whose trainer is off by `gaps`."""
    trainer = TrainerLogprobs(name="scored", version=1, lengths=LENGTHS, array="trainer", temperature=temperature)
    oracle = OracleLogprobs(name="scored", version=1, lengths=LENGTHS, whole=(61, 201), array="oracle")
    exact = torch.full((sum(LENGTHS),), -6.1, dtype=torch.float64)
    arrays = {"oracle": exact, "trainer": exact if gaps is None else exact + gaps}
    manifest = Manifest(dtype=dtype, complete=True)
    return Trace(manifest, [oracle, trainer, *more], lambda key: {"array": arrays[key].numpy()})


FLOORS = [LONG, SHORT]


def test_twice_the_floor_of_each_sequences_own_length() -> None:
    found = bounds(trace(*FLOORS, NOISE), Stage.LOGPROB, [61, 201])
    assert [item.absolute for item in found.greatest] == [0.2, 0.6]
    assert {name: item.absolute for name, item in found.body.items()} == pytest.approx(
        {"mean": 0.04 + 9.8 * 0.01 / math.sqrt(260), "median": 0.018 + 9.8 * 0.01 / math.sqrt(260)}
    )
    assert "long" in found.greatest[1].source
    assert "long" in found.body["median"].source


@pytest.mark.parametrize("floors", [FLOORS, []], ids=["too-long", "none"])
def test_without_a_floor_of_that_length_the_run_measures(floors: list[StoredFloor]) -> None:
    found = bounds(trace(*floors, NOISE), Stage.LOGPROB, [61, 257])
    assert [item.absolute for item in found.greatest] == pytest.approx([0.42, 0.42])
    assert {name: item.absolute for name, item in found.body.items()} == pytest.approx(
        {"mean": 0.024 + 9.8 * 0.03 / math.sqrt(260)}
    )


def test_samples_of_one_prompt_scatter_together() -> None:
    """Clean on four H200s: a hybrid mixture's 224 samples of two prompts were off by 0.0192 nats on the mean."""
    own = replace(NOISE, mean=0.006, deviation=0.02)
    elsewhere = DtypeNoise(name="sampled at length", version=0, greatest=0.05, mean=0.03, deviation=0.06)
    asked = (trace(own, elsewhere), Stage.ROLLOUT, "scored", 1, LENGTHS)
    assert bounds_of(*asked, apart=sum(LENGTHS)).body["mean"].absolute == pytest.approx(0.012 + 0.196 / math.sqrt(260))
    assert bounds_of(*asked, apart=40).body["mean"].absolute == pytest.approx(0.06 + 0.588 / math.sqrt(40))
    stored = bounds_of(trace(*FLOORS), Stage.ROLLOUT, "scored", 1, LENGTHS, [61, 201], apart=40)
    assert stored.body["mean"].absolute == pytest.approx(0.04 + 0.098 / math.sqrt(40))


def test_few_tokens_borrow_the_greatest_noise_of_the_run() -> None:
    """Clean on an H100: a mixture's 16 sampled tokens were off by 0.97 nats, their own noise times 3 was 0.67."""
    elsewhere = DtypeNoise(name="sampled at length", version=0, greatest=1.1, mean=0.03, deviation=0.06)
    found = bounds(trace(NOISE, elsewhere), Stage.ROLLOUT, [61, 201])
    assert [item.absolute for item in found.greatest] == [2.2, 2.2]
    assert "greatest of all tokens" in found.greatest[0].source
    assert found.body["mean"].absolute == pytest.approx(0.024 + 9.8 * 0.03 / math.sqrt(260))
    slightly = DtypeNoise(name="sampled at length", version=0, greatest=0.1, mean=0.03, deviation=0.06)
    assert bounds(trace(NOISE, slightly), Stage.ROLLOUT, [61, 201]).greatest[0].absolute == pytest.approx(0.42)


def test_scores_under_told_routes_borrow_nothing_and_lend_nothing() -> None:
    elsewhere = DtypeNoise(name="sampled at length", version=0, greatest=1.1, mean=0.03, deviation=0.06)
    assert bounds(trace(NOISE, elsewhere), Stage.REPLAY, [61, 201]).greatest[0].absolute == pytest.approx(0.42)
    told = GivenRoutes(name="sampled at length", version=0, array="told", rollouts=())
    assert bounds(trace(NOISE, elsewhere, told), Stage.ROLLOUT, [61, 201]).greatest[0].absolute == pytest.approx(0.42)


def test_single_tokens_of_routers_that_flip_are_not_judged_in_training() -> None:
    """A clean token of `tiny:add-moe` on tp=2 was 3.07 times the greatest noise off; its step's mean was not."""
    run = trace(replace(NOISE, routed=True))
    found = bounds(run, Stage.LOGPROB, [61, 201])
    assert [item.absolute for item in found.greatest] == [math.inf, math.inf]
    assert found.body["mean"].absolute == pytest.approx(0.024 + 9.8 * 0.03 / math.sqrt(260))


def test_a_quantized_engine_is_judged_by_its_own_noise() -> None:
    run = trace(*FLOORS, EngineNoise(name="scored", version=1, greatest=0.5, mean=0.012, deviation=0.03), NOISE)
    assert bounds(run, Stage.ROLLOUT, [61, 201]).greatest[0].absolute == 3.0
    assert bounds(run, Stage.LOGPROB, [61, 201]).greatest[0].absolute == 0.2


def test_fp32_has_one_bound_and_bf16_without_any_noise_has_none() -> None:
    found = bounds(trace(*FLOORS, dtype="float32"), Stage.LOGPROB, [61, 201])
    assert [item.absolute for item in found.greatest] == [1e-5, 1e-5]
    assert found.body == {}
    with pytest.raises(LookupError, match="no measured noise of `scored` for version 1"):
        bounds(trace(), Stage.LOGPROB, [61, 201])


@pytest.mark.parametrize(("scale", "bound"), [(7e-7, 1e-5), (2e-5, 2.4e-4)], ids=["as-tiny-ones", "coarser"])
def test_in_fp32_where_a_places_own_scale_is_unknown_the_versions_coarsest_counts(scale: float, bound: float) -> None:
    measured = DtypeNoise(name="other", version=1, greatest=1e-4, mean=1e-6, deviation=0.0, scale=1e-7, coarsest=scale)
    found = bounds(trace(measured, dtype="float32"), Stage.LOGPROB, [61, 201])
    assert [item.absolute for item in found.greatest] == pytest.approx([bound, bound])
    assert ("float64" in found.greatest[0].source) == (bound > 1e-5)


@pytest.mark.parametrize(
    ("at", "gap", "bad"),
    [(5, 4e-4, []), (5, 5e-4, ["scored sequence 0"]), (6, 4e-4, []), (6, 5e-4, ["scored sequence 0"]),
     (200, 5e-5, []), (200, 9e-5, ["scored sequence 1"])],
)  # fmt: skip
def test_in_fp32_a_token_is_held_against_the_greatest_scale_of_its_sequence(
    at: int, gap: float, bad: list[str]
) -> None:
    """The scales of a trained model of 30 layers: 7e-6 nats over all places, 3.9e-5 at the coarsest one."""
    gaps, scales = np.zeros(260), np.full(260, 4e-6)
    gaps[at], scales[5] = gap, 3.9e-5
    assert violated_in_fp32(LENGTHS, gaps, scales, scale=7e-6) == bad


OFF = 1e-6 * np.array(
    [15, -160, -2, -620, 72, 4, 27, 4, 17, 9, 2, 55, 3, 72, 17, -13, -9, -13, -6, -32, 36, -15, 6, 10, 7, 32, 13, 29,
     -2, 30, -4, 46, 4, 13, 2, 10, 6, -7, -31, 34, -78, -25, -2, 10, -4]
)  # fmt: skip
"""A clean engine's distance from transformers, nats, at 45 tokens of SmolLM2-135M after one step in float32."""
SCALES = 1e-6 * np.array(
    [7.4, 10.9, 8.2, 36.1, 190.8, 6.6, 16.9, 13.1, 12.3, 12.5, 13.0, 14.2, 18.5, 15.7, 6.3, 7.7, 6.0, 6.4, 10.4, 20.8,
     14.1, 5.5, 14.7, 8.2, 16.0, 10.6, 21.7, 10.6, 13.4, 9.6, 9.9, 12.3, 6.5, 5.3, 20.2, 11.4, 9.9, 6.6, 12.5, 16.6,
     12.8, 9.5, 7.6, 12.4, 11.3]
)  # fmt: skip
"""Scales there by one float32 pass, which was near zero by chance at tokens 1 and 3: the engine is 15 and 17 off."""


EPSILON = 1e-6 * np.array(
    [-1162, -3332, -2120, -740, -359, -1363, -1381, 3298, -2861, -326, 503, 454, -2248, 4593, -1157, -343, -1074, -408,
     3132, -500, -612, -2422, -951, -1089, 3297, 389, 3650, -2374, -7063, -2785, 1130, -230, 2815, -6276, -1584, 3371,
     235, 123, 1951, 462, 526, -910, 2650, -2370, 60]
)  # fmt: skip
"""What an epsilon of 1e-6 for 1e-5 changes these tokens by, nats, measured in transformers before the step."""


@pytest.mark.parametrize(("fault", "bad"), [(0.0, []), (EPSILON, ["scored sequence 0"])], ids=["clean", "epsilon"])
def test_a_place_whose_own_scale_is_near_zero_by_chance(fault: float | np.ndarray, bad: list[str]) -> None:
    assert violated_in_fp32((45,), OFF + fault, SCALES, scale=1.43e-5) == bad


def violated_in_fp32(lengths: tuple[int, ...], gaps: np.ndarray, scales: np.ndarray, scale: float) -> list[str]:
    """Sequences that LGP001 finds off by more than is allowed."""
    noise = DtypeNoise(
        name="scored", version=1, greatest=4.5e-5, mean=1e-6, deviation=0.0, scale=scale, coarsest=float(scales.max())
    )
    arrays = {"trainer": {"array": gaps - 6.1}, "oracle": {"array": np.full(len(gaps), -6.1), "scale": scales}}
    whole = tuple(length + 1 for length in lengths)
    sides = (
        OracleLogprobs(name="scored", version=1, lengths=lengths, whole=whole, array="oracle"),
        TrainerLogprobs(name="scored", version=1, lengths=lengths, array="trainer", temperature=1.0),
    )
    run = Trace(Manifest(dtype="float32", complete=True), [*sides, noise], arrays.__getitem__)
    return [item.what for item in trainer_logprob_differs_from_oracle(run) if not item.same]


@pytest.mark.parametrize(
    ("temperature", "gap", "bad"), [(0.1, 5e-5, 0), (0.1, 2e-4, 2), (0.5, 5e-5, 2), (2.0, 1.5e-5, 2)]
)
def test_a_temperature_below_1_magnifies_what_float32_rounds(temperature: float, gap: float, bad: int) -> None:
    gaps = torch.full((260,), gap, dtype=torch.float64)
    found = list(trainer_logprob_differs_from_oracle(trace(dtype="float32", gaps=gaps, temperature=temperature)))
    assert sum(not item.same for item in found) == bad


def test_a_mean_of_few_tokens_is_not_judged() -> None:
    found = bounds(trace(*FLOORS), Stage.ROLLOUT, [150], (4,))
    assert [item.absolute for item in found.greatest] == [0.6]
    assert found.body == {}


@pytest.mark.parametrize(
    ("gaps", "bad"),
    [
        (torch.full((260,), 0.007), set()),
        (torch.full((260,), 0.03), {"scored median"}),
        (torch.full((260,), 0.07), {"scored median", "scored mean"}),
        (torch.tensor([0.25] + [0.0] * 259), {"scored sequence 0"}),
        (torch.tensor([0.0] * 259 + [0.25]), set()),
    ],
    ids=["noise", "small-everywhere", "large-everywhere", "one-token-short", "one-token-long"],
)
def test_what_the_mean_lets_through_the_median_does_not(gaps: torch.Tensor, bad: set[str]) -> None:
    """A shift of every token by a few times the usual noise hides in a mean that a few flips of a router make large."""
    found = list(trainer_logprob_differs_from_oracle(trace(*FLOORS, gaps=gaps.double())))
    assert {item.what for item in found if not item.same} == bad
    assert len(found) == 5


@pytest.mark.parametrize(("dtype", "verdict"), [(torch.float32, []), (torch.bfloat16, ["scored precision"])])
def test_values_that_were_rounded_to_bfloat16_are_seen_below_the_noise(dtype: torch.dtype, verdict: list[str]) -> None:
    gaps = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(2)) * 1e-3
    gaps = (-6.1 + gaps).to(dtype).double() + 6.1
    found = trainer_logprob_differs_from_oracle(trace(NOISE, gaps=gaps))
    assert [item.what for item in found if not item.same] == verdict


@pytest.mark.parametrize(("num_off", "holds"), [(30, True), (160, False)])
def test_routers_that_flip_count_as_much_as_the_greatest_noise_in_the_mean(num_off: int, holds: bool) -> None:
    """Clean on two cores: eight of 130 tokens were off by 0.13 to 0.31 nats, transformers' own by 0.076 at most."""
    gaps = torch.full((sum(LENGTHS),), 0.012, dtype=torch.float64)
    gaps[:num_off] = 0.3
    run = trace(replace(NOISE, routed=True), gaps=gaps)
    assert gaps.mean() > bounds(run, Stage.LOGPROB, [61, 201]).body["mean"].absolute
    assert all(item.same for item in trainer_logprob_differs_from_oracle(run)) is holds
