"""Steps of the GRPO family against textbook code in float64, and their independence of every layout.

The textbook (`tests/textbook_step.py`) has whole sequences. The trainer's form is one weight per token and one loss per
row. Bounds: 1e-10 of the greatest value, which is 5e5 roundings of float64; 1e-12 between two layouts of the same rows,
which is 5e3. `tests/quality/test_planted_losses.py` shows what these properties catch.

What this does not exercise: real ranks (tests/dist/test_train_parity.py of the trainer).
"""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laid_out_step import Layout, layouts, trained
from tests.textbook_step import Recipe, batches, recipes, textbook, textbook_kl
from verifier.algorithms.advantages import advantages
from verifier.algorithms.aggregation import AGGREGATIONS, token_weights
from verifier.algorithms.filters import DropReason, zero_variance
from verifier.algorithms.kl import FLOOR, KL_KINDS, LIMIT, kl_penalty
from verifier.algorithms.losses import LossInputs, loss_metrics, token_loss
from verifier.algorithms.off_policy import LEVELS, CorrectionOptions, correction
from verifier.algorithms.registry import LossOptions

TEXTBOOK, LAYOUT = 1e-10, 1e-12


def assert_near(got, want, bound):
    (loss, gradients), (other_loss, others) = got, want
    assert abs(loss - other_loss) <= bound * max(1.0, abs(other_loss))
    for pair, other_pair in zip(gradients, others, strict=True):
        for own, other in zip(pair, other_pair, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=bound * max(1.0, np.abs(other).max(initial=0)))


@given(batch=batches(), recipe=recipes())
def test_a_step_is_the_textbooks(batch, recipe):
    assert_near(trained(batch, recipe, Layout([range(len(batch))])), textbook(batch, recipe), TEXTBOOK)


@given(batch=batches(), recipe=recipes(), data=st.data())
def test_no_split_order_padding_or_context_parallel_cut_changes_a_step(batch, recipe, data):
    plain = trained(batch, recipe, Layout([range(len(batch))]))
    assert_near(trained(batch, recipe, data.draw(layouts(batch))), plain, LAYOUT)


@given(batch=batches(), how=st.sampled_from(AGGREGATIONS), data=st.data())
def test_gspo_is_the_loss_by_sequence_under_any_context_parallel_cut(batch, how, data):
    """Whatever the aggregation: it gives all tokens of a sequence one weight."""
    recipe = Recipe("gspo", "dr_grpo", how, LossOptions(clip_low=0.03, clip_high=0.04))
    assert_near(trained(batch, recipe, data.draw(layouts(batch))), textbook(batch, recipe), TEXTBOOK)


@given(batch=batches(), recipe=recipes(), data=st.data())
def test_a_permuted_batch_has_bitwise_the_same_values_by_id(batch, recipe, data):
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = [batch[row] for row in order]
    for of in (
        lambda b: advantages([s.reward for s in b], [s.group for s in b], recipe.estimator,
                             token_counts=[sum(s.mask) for s in b]),
        lambda b: token_weights([np.array(s.mask, bool) for s in b], [s.group for s in b], recipe.how, recipe.constant),
    ):  # fmt: skip
        plain = of(batch)
        for row, own in zip(order, of(shuffled), strict=True):
            np.testing.assert_array_equal(own, plain[row], strict=True)


@given(batch=batches(), recipe=recipes(), cuts=st.integers(1, 3), data=st.data())
def test_interleaved_steps_of_trajectories_change_nothing(batch, recipe, cuts, data):
    """Advantages by trajectory, spread to the steps by id; SkyRL's went by a running sum over the order."""
    steps = [(row, part) for row in range(len(batch)) for part in range(cuts)]
    share = [np.array(s.mask, bool)[part::cuts].sum() for s in batch for part in range(cuts)]
    counts = dict(zip(steps, share, strict=True))
    order = data.draw(st.permutations(steps))

    def values(order):
        return advantages(
            [batch[row].reward if part == 0 else 0.0 for row, part in order], [batch[row].group for row, _ in order],
            recipe.estimator, trajectories=[f"trajectory-{row}" for row, _ in order],
            token_counts=[counts[step] for step in order],
        )  # fmt: skip

    whole = advantages([s.reward for s in batch], [s.group for s in batch], recipe.estimator,
                       token_counts=[sum(s.mask) for s in batch])  # fmt: skip
    np.testing.assert_array_equal(values(order), [whole[row] for row, _ in order])


@given(batch=batches(), kind=st.sampled_from(KL_KINDS))
def test_the_kl_penalty_is_the_textbooks_sum(batch, kind):
    got = kl_penalty([np.array(s.old) for s in batch], [np.array(s.reference) for s in batch],
                     [np.array(s.mask, bool) for s in batch], kind)  # fmt: skip
    want = [sum(float(textbook_kl(torch.tensor(s.old[t], dtype=torch.float64), s.reference[t], kind))
                for t, inside in enumerate(s.mask) if inside) for s in batch]  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=0, atol=TEXTBOOK)


@given(batch=batches())
def test_the_zero_variance_filter_drops_what_has_no_gradient(batch):
    """Exactly the rollouts whose whole group has advantage 0 by GRPO."""
    groups = [s.group for s in batch]
    value = advantages([s.reward for s in batch], groups)
    flat = {name for name in groups if all(v == 0 for v, g in zip(value, groups, strict=True) if g == name)}
    expected = [DropReason.ZERO_VARIANCE if name in flat else None for name in groups]
    assert zero_variance([s.reward for s in batch], groups) == expected


logprobs = st.one_of(st.floats(max_value=0.0, allow_nan=False), st.sampled_from([-math.inf, FLOOR, -LIMIT, 0.0]))


@given(
    rows=st.lists(st.tuples(logprobs, logprobs, logprobs, st.floats(-5, 5)), min_size=1, max_size=4), recipe=recipes(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_any_finite_or_minus_infinite_logprobs_give_finite_losses_and_gradients(rows, recipe, dtype):
    current, divisor, reference, advantage = (torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True))
    current.requires_grad_()
    inputs = LossInputs(
        current_T=current, entropy_T=torch.ones_like(current), divisor_T=divisor, advantage_T=advantage,
        reference_T=reference, mask_T=torch.ones(len(rows), dtype=torch.bool),
        sequence_mean=lambda value_T: value_T.mean().expand(len(value_T)),
    )  # fmt: skip
    loss = token_loss(recipe.loss, inputs, recipe.options)
    loss.sum().backward()
    assert loss.dtype == dtype
    assert loss.isfinite().all()
    assert current.grad.isfinite().all()
    metrics = loss_metrics(recipe.loss, inputs, recipe.options)
    assert metrics.ratio_T.isfinite().all()
    assert metrics.clamped_T[current < FLOOR].all()


@given(
    rows=st.lists(st.tuples(logprobs, logprobs, st.booleans()), max_size=5), weight=st.sampled_from([None, *LEVELS]),
    mask=st.sampled_from([None, *LEVELS]), cap=st.sampled_from([None, 2.0]),
)  # fmt: skip
def test_any_finite_or_minus_infinite_logprobs_give_finite_importance_factors(rows, weight, mask, cap):
    own, other, inside = ([row[at] for row in rows] for at in range(3))
    (factors,) = correction(["a"], [np.array(own)], [np.array(other)], [np.array(inside, bool)],
                        CorrectionOptions(weight=weight, mask=mask, cap=cap))  # fmt: skip
    assert np.isfinite(factors).all()
    assert (factors[~np.array(inside, bool)] == 0).all()
