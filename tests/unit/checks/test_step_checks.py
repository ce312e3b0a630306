"""TRN001: the norm that an optimizer clips by; LSS001 and LSS002: lengths and losses of less than fp32."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, MANIFEST, change, clean, having, make_trace
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.trace import Trace
from verifier.stages.loss.records import GradientRecord
from verifier.stages.train.records import StepReport


@pytest.mark.parametrize(("norm", "verdict"), [(2.000019, Verdict.HOLDS), (2.00003, Verdict.VIOLATED)])
def test_a_norm_of_other_gradients_is_seen(norm: float, verdict: Verdict) -> None:
    """1e-5 of a norm of 2 is allowed; the weights are right in both."""
    outcome = run_check(REGISTRY["TRN001"], make_trace(change(StepReport, having(grad_norm=norm))))
    assert outcome.verdict is verdict
    if verdict is Verdict.VIOLATED:
        assert outcome.finding.count == 1
        assert outcome.finding.first.sentence == (
            "the gradient norm on rank 0 is 2.00003 (the optimizer's), it should be 2 (of all gradients)"
        )


def test_a_norm_that_is_not_finite_is_seen() -> None:
    outcome = run_check(REGISTRY["TRN001"], make_trace(change(StepReport, having(grad_norm="nan"))))
    assert outcome.verdict is Verdict.VIOLATED


def test_a_step_whose_norm_was_not_recorded_is_inconclusive() -> None:
    outcome = run_check(REGISTRY["TRN001"], make_trace(change(StepReport, lambda item: None)))
    assert outcome.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("length", "passes", "bad"),
    [
        (0.35, 1, []), (1.65, 1, []), (1.67, 1, ["a (length)"]), (0.33, 1, ["a (length)"]),
        (2.31, 6, []), (2.33, 6, ["a (length)"]), (-0.33, 6, ["a (length)"]),
    ],
)  # fmt: skip
def test_a_gradient_that_is_longer_than_noise_makes_it_is_seen(length: float, passes: int, bad: list[str]) -> None:
    """0.11 of its length is this tensor's own noise, while of all tensors the greatest is as long as a gradient."""
    facts = {"gradient_noise": 1.0, "group": "a", "group_length": length, "group_noise": 0.11, "noise_passes": passes}
    outcome = run_check(REGISTRY["LSS001"], make_trace(change(GradientRecord, having(**facts), name="a")))
    assert outcome.error is None
    assert [item.what for item in (outcome.finding.bad if outcome.finding else ())] == bad


@pytest.mark.parametrize(
    ("length", "noise", "verdict"),
    [(0.0, 0.3, Verdict.VIOLATED), (1e-3, 0.3, Verdict.HOLDS), (0.0, 0.6, Verdict.HOLDS)],
)
def test_a_gradient_of_exactly_zero_is_no_rounding(length: float, noise: float, verdict: Verdict) -> None:
    """A bias of keys has a gradient of nothing but noise, above its own length."""
    facts = {"gradient_noise": 1.0, "group": "a", "group_length": length, "group_noise": noise}
    outcome = run_check(REGISTRY["LSS001"], make_trace(change(GradientRecord, having(**facts), name="a")))
    assert outcome.verdict is verdict


@pytest.mark.parametrize(("command", "verdict"), [("probe", Verdict.HOLDS), ("roundtrip", Verdict.VIOLATED)])
def test_a_loops_gradient_may_be_in_bf16(command: str, verdict: Verdict) -> None:
    """Weights in bf16 have such gradients in torch; a run of this package sums them in float32."""
    facts = {"gradient_noise": 1.0, "gradient_dtype": "bfloat16"}
    trace = make_trace(change(GradientRecord, having(**facts), name="a"), replace(MANIFEST, command=command))
    assert run_check(REGISTRY["LSS001"], trace).verdict is verdict


@pytest.mark.parametrize(("acting", "verdict"), [(10, Verdict.VIOLATED), (9, Verdict.HOLDS)])
def test_no_length_is_judged_of_few_tokens(acting: int, verdict: Verdict) -> None:
    """One token of 31 had a gradient in a clean update: that of one router was 1.12 times as long."""
    facts = {"gradient_noise": 1.0, "group": "a", "group_length": 1.2, "group_noise": 0.03, "acting": acting}
    outcome = run_check(REGISTRY["LSS001"], make_trace(change(GradientRecord, having(**facts), name="a")))
    assert outcome.verdict is verdict


@pytest.mark.parametrize(("length", "holds"), [(1.033, True), (1.08, True), (1.1, False)])
def test_few_elements_say_little_of_their_noise(length: float, holds: bool) -> None:
    """A `D` of 16 elements was off by 0.033 on an H200, and said of itself that 0.015 is its noise."""
    noises = {"D": 0.015, "A_log": 0.045}
    names = iter(noises)
    run = []
    for item in clean():
        if type(item) is GradientRecord and (name := next(names, None)) is not None:
            group = {
                "group": f"backbone.layers.4.mixer.{name}", "group_noise": noises[name],
                "group_length": length if name == "D" else 1.0, "gradient_noise": 1.0,
            }  # fmt: skip
            item = replace(item, **group)
        run.append(item)
    outcome = run_check(REGISTRY["LSS001"], make_trace(run))
    assert outcome.error is None
    assert (outcome.verdict is Verdict.HOLDS) == holds


@pytest.mark.parametrize(("gap", "verdict"), [(1.1, Verdict.HOLDS), (1.3, Verdict.VIOLATED)])
def test_a_gradient_is_held_against_the_noisiest_update_of_the_step(gap: float, verdict: Verdict) -> None:
    """Clean on two cores: an element was off by 7.3 times its update's greatest noise, 4.0 times that of the step."""
    template = next(item for item in clean() if type(item) is GradientRecord)
    measured = replace(template.gradient, value=gap)
    run = [item for item in clean() if type(item) is not GradientRecord]
    for update, noise in ((1, 0.1), (2, 0.25)):
        facts = {"gradient_scale": 1.0, "gradient_doubt": 0.0, "gradient_noise": noise, "update": update}
        run.append(replace(template, gradient=measured if update == 1 else template.gradient, **facts))
    assert run_check(REGISTRY["LSS001"], make_trace(run)).verdict is verdict


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize(("gap", "verdict"), [(1.1e-3, Verdict.HOLDS), (1.3e-3, Verdict.VIOLATED)])
def test_in_float32_a_gradient_is_held_against_twelve_measured_roundings_of_it(
    gap: float, verdict: Verdict, scale: float
) -> None:
    template = next(item for item in clean() if type(item) is GradientRecord)
    measured = replace(template.gradient, value=gap)
    facts = {"gradient_scale": scale, "gradient_doubt": 0.0, "gradient_noise": 0.0, "gradient_rounding": 1e-4}
    run = [item for item in clean() if type(item) is not GradientRecord]
    run.append(replace(template, gradient=measured, **facts))
    assert run_check(REGISTRY["LSS001"], make_trace(run)).verdict is verdict


@pytest.mark.parametrize(("length", "holds"), [(1.17, True), (0.83, True), (1.19, False), (0.5, False)])
def test_a_length_in_a_training_update_is_held_against_the_noisiest_of_the_step(length: float, holds: bool) -> None:
    """Clean on two cores: `k_norm` was 1.11 times as long in an update of 160 tokens, twice what its noise allowed.

    Of the tensor in all layers and updates 0.03 is the greatest noise, of another in the second update 0.05.
    """
    noises = {(1, 0): 0.03, (1, 1): 0.02, (2, 0): 0.02, (2, 1): 0.02, (2, 2): 0.05}
    assert lengths_hold(noises, length) == holds


@pytest.mark.parametrize(("length", "holds"), [(1.23, True), (1.25, False)])
def test_a_quiet_update_of_a_noisy_step_is_held_against_its_own_noise(length: float, holds: bool) -> None:
    """Its greatest noise is 0.04, that of the tensor in all updates 0.1."""
    assert lengths_hold({(1, 0): 0.1, (1, 1): 0.02, (2, 0): 0.03, (2, 1): 0.04}, length) == holds


def lengths_hold(noises: dict[tuple[int, int], float], length: float) -> bool:
    """LSS001 of a tensor in two layers, and of another, by their noise; the first has this length in the second update.

    Keys of `noises` are update and layer; a third layer stands for the other tensor.
    """
    template = next(item for item in clean() if type(item) is GradientRecord)
    run = [item for item in clean() if type(item) is not GradientRecord]
    names = ["model.layers.0.k_norm", "model.layers.1.k_norm", "model.norm"]
    for (update, layer), noise in noises.items():
        facts = {
            "name": names[layer], "group": names[layer], "group_noise": noise,
            "group_length": length if (update, layer) == (2, 0) else 1.0, "gradient_noise": 1.0, "update": update,
        }  # fmt: skip
        run.append(replace(template, **facts))
    outcome = run_check(REGISTRY["LSS001"], make_trace(run))
    assert outcome.error is None
    return outcome.verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("noise", "error", "verdict"),
    [
        (0.6, 0.0, Verdict.HOLDS),
        (0.4, 0.0, Verdict.VIOLATED),
        (0.25, 0.05, Verdict.VIOLATED),
        (0.3, 0.1, Verdict.HOLDS),
    ],
)
def test_a_loss_may_be_off_by_the_noise_of_a_tokens_loss(noise: float, error: float, verdict: Verdict) -> None:
    """It is off by 1 where the noise of gradients would allow 7.5."""
    facts = {"loss": 8.0, "loss_noise": noise, "loss_noise_error": error, "gradient_noise": 1.0}
    run = [
        replace(item, num_tokens=20, **facts)
        if type(item) is GradientRecord
        else replace(item, num_tokens=20)
        if type(item) is StepReport
        else item
        for item in clean()
    ]
    trace = Trace(replace(MANIFEST, dtype="bfloat16"), run, ARRAYS.__getitem__)
    outcome = run_check(REGISTRY["LSS002"], trace)
    assert outcome.verdict is verdict
    if outcome.finding:
        assert outcome.finding.first.allowed == (
            "0.8, 2 times the mean noise of a token's loss, with 3 standard errors "
            "(this run's: transformers in its dtype against itself in fp32)"
        )


def test_a_loss_of_few_tokens_is_not_judged_by_their_noise() -> None:
    """A clean update of one token was off by 1.2 times what its noise allowed."""
    facts = {"loss": 8.0, "loss_noise": 0.1, "gradient_noise": 1.0, "num_tokens": 9}
    run = [
        replace(item, **facts) if type(item) is GradientRecord
        else replace(item, num_tokens=9) if type(item) is StepReport
        else item
        for item in clean()
    ]  # fmt: skip
    trace = Trace(replace(MANIFEST, dtype="bfloat16"), run, ARRAYS.__getitem__)
    assert run_check(REGISTRY["LSS002"], trace).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ({"further_loss": 4.0, "num_further": 20}, Verdict.HOLDS),
        ({"further_loss": 4.001, "num_further": 20}, Verdict.VIOLATED),
        ({"further_loss": 4.0, "num_further": 21}, Verdict.VIOLATED),
        ({}, Verdict.VIOLATED),
    ],
)
def test_the_loss_of_further_tokens_and_their_number_are_the_oracles(told: dict[str, float], verdict: Verdict) -> None:
    run = [
        replace(item, further_loss=4.0, further_noise=1e-6, num_further=20)
        if type(item) is GradientRecord
        else replace(item, **told)
        if type(item) is StepReport
        else item
        for item in clean()
    ]
    assert run_check(REGISTRY["LSS002"], Trace(MANIFEST, run, ARRAYS.__getitem__)).verdict is verdict
