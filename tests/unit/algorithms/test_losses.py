"""Losses: values by hand, what a mask hides, metrics, and what is refused."""

import math

import pytest
import torch

from verifier.algorithms.losses import LossInputs, loss_metrics, token_loss
from verifier.algorithms.registry import LossOptions, check_loss, names
from verifier.errors import UsageError

NOTHING = math.nan


def inputs(ratios, advantages, *, mask=None, dtype=torch.float64, reference=None) -> LossInputs:
    """Rows of one sequence with given ratios of current to divisor, which is -2 nats."""
    current = torch.tensor([-2 + math.log(ratio) for ratio in ratios], dtype=dtype, requires_grad=True)
    mask_T = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)

    def mean(value_T):
        return value_T[mask_T].mean().expand(len(value_T))

    return LossInputs(
        current_T=current, entropy_T=torch.full_like(current, 0.5), divisor_T=torch.full_like(current, -2.0),
        advantage_T=torch.tensor(advantages, dtype=torch.float64), mask_T=mask_T, sequence_mean=mean,
        reference_T=None if reference is None else torch.full_like(current, reference),
    )  # fmt: skip


def run(name, given, **options):
    loss = token_loss(name, given, LossOptions(**options))
    loss.sum().backward()
    return loss.tolist(), given.current_T.grad.tolist()


def test_clipped_by_hand():
    """Clipped above for a good token, below for a bad one, and never where clipping would make the loss smaller."""
    given = inputs([1.5, 1.25, 0.5, 0.5, 1.5], [1.0, 1.0, 1.0, -1.0, -1.0])
    loss, gradient = run("clipped", given, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx([-1.28, -1.25, -0.5, 0.8, 1.5], rel=1e-14)
    assert gradient == pytest.approx([0, -1.25, -0.5, 0, 1.5], rel=1e-14)
    metrics = loss_metrics("clipped", given, LossOptions(clip_low=0.2, clip_high=0.28))
    assert metrics.clipped_T.tolist() == [True, False, False, True, False]
    assert metrics.ratio_T.tolist() == pytest.approx([1.5, 1.25, 0.5, 0.5, 1.5], rel=1e-14)


def test_dual_clip_bounds_bad_tokens_alone():
    given = inputs([5.0, 5.0], [-1.0, 1.0])
    loss, gradient = run("clipped", given, dual_clip=3.0)
    assert loss == pytest.approx([3.0, -1.2], rel=1e-14)
    assert gradient == [0, 0]
    assert loss_metrics("clipped", given, LossOptions(dual_clip=3.0)).clipped_T.all()


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    loss, gradient = run("cispo", inputs([5.0, 0.1, 0.1], [1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    assert gradient == pytest.approx([-1.28, -0.8, 0.8], rel=1e-14)
    assert loss[0] == pytest.approx(-1.28 * (math.log(5) - 2), rel=1e-14)
    assert run("cispo", inputs([0.1], [1.0]), clip_low=1.5)[1] == pytest.approx([-0.1], rel=1e-14)


def test_importance_and_cross_entropy_by_hand():
    assert run("importance", inputs([5.0], [-2.0]))[1] == pytest.approx([10.0], rel=1e-14)
    loss, gradient = run("cross_entropy", inputs([1.0], [NOTHING]))
    assert (loss, gradient) == ([2.0], [-1.0])


def test_gspo_clips_a_sequence_whole():
    """Ratios 4 and 1/4: each is clipped by token, and the sequence's ratio is 1."""
    given = inputs([4.0, 0.25], [1.0, 1.0])
    assert run("gspo", given)[1] == pytest.approx([-1, -1], rel=1e-14)
    assert not loss_metrics("gspo", given, LossOptions()).clipped_T.any()
    assert loss_metrics("clipped", given, LossOptions()).clipped_T.tolist() == [True, False]


@pytest.mark.parametrize("name", names("loss"))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rows_outside_of_the_mask_are_exactly_nothing(name, poison):
    def column(value):
        return torch.tensor([value, poison], requires_grad=True)

    current, entropy = column(-1.0), column(0.5)
    given = LossInputs(
        current_T=current, entropy_T=entropy, divisor_T=column(-1.5), advantage_T=column(1.0),
        reference_T=column(-1.2), mask_T=torch.tensor([True, False]), sequence_mean=lambda value_T: value_T * poison,
    )  # fmt: skip
    if name == "gspo":
        given = LossInputs(**{field: getattr(given, field) for field in given.__slots__ if field != "sequence_mean"},
                           sequence_mean=lambda value_T: torch.tensor([0.5, poison]))  # fmt: skip
    options = LossOptions(kl_weight=0.1, entropy_weight=0.1)
    loss = token_loss(name, given, options)
    loss.sum().backward()
    assert (loss[1], current.grad[1], entropy.grad[1]) == (0, 0, 0)
    assert loss[0].isfinite()
    assert current.grad[0] != 0
    metrics = loss_metrics(name, given, options)
    assert (metrics.ratio_T[1], metrics.kl_T[1], metrics.clipped_T[1], metrics.clamped_T[1]) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", names("loss"))
def test_a_nan_inside_of_the_mask_is_not_hidden(name):
    given = inputs([1.0, 1.0], [1.0, 1.0])
    with torch.no_grad():
        given.current_T[0] = math.nan
    assert token_loss(name, given, LossOptions())[0].isnan()


def test_the_ratio_is_exactly_1_and_the_kl_exactly_0_where_both_sides_are_one():
    given = inputs([1.0, 1.0], [1.0, -1.0], dtype=torch.float32, reference=-2.0)
    metrics = loss_metrics("clipped", given, LossOptions())
    assert metrics.ratio_T.tolist() == [1, 1]
    assert metrics.kl_T.tolist() == [0, 0]
    assert token_loss("clipped", given, LossOptions()).dtype == torch.float32


def test_kl_and_entropy_are_added_by_their_weights():
    given = inputs([1.0], [0.0], reference=-2.5)
    loss, _ = run("clipped", given, kl_weight=0.3, kl_kind="k1", entropy_weight=0.1)
    assert loss == pytest.approx([0.3 * 0.5 - 0.1 * 0.5], rel=1e-14)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, r"loss `ppo` is unknown \(known: cispo, clipped, cross_entropy, gspo, importance\)"),
        ("clipped", {"kl_weight": 0.1}, "kl_weight is 0.1 and there is no reference"),
        ("gspo", {"dual_clip": 3.0}, "dual_clip is 3 and the loss is `gspo`, which has none"),
    ],
)
def test_contradictions_are_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        check_loss(name, LossOptions(**options), has_reference=False)
    with pytest.raises(UsageError, match=message):
        token_loss(name, inputs([1.0], [1.0]), LossOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"clip_high": math.inf}, "clip_high is inf"),
        ({"kl_weight": math.nan}, "kl_weight is nan"),
        ({"kl_kind": "k4"}, r"KL estimate `k4` is unknown \(known: k1, k2, k3\)"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0, it must be above 1"),
        ({"entropy_weight": math.nan}, "entropy_weight is nan"),
    ],
)
def test_options_outside_of_their_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        LossOptions(**options)
