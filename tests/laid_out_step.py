"""A step of `verifier.algorithms` as ranks compute it: micro-batches, padding, rows dealt to context-parallel ranks."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from tests.textbook_step import zero_if_none
from verifier.algorithms.advantages import advantages
from verifier.algorithms.aggregation import token_weights
from verifier.algorithms.losses import LossInputs, token_loss
from verifier.algorithms.off_policy import correction


@dataclass(frozen=True)
class Layout:
    """Micro-batches of sequences, rows of padding in each, and the number of shards that rows are dealt to."""

    micro_batches: list
    padding: int = 0
    shards: int = 1
    seed: int = 0


@st.composite
def layouts(draw, batch):
    order = draw(st.permutations(range(len(batch))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return Layout(parts, draw(st.integers(0, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 99)))


def trained(batch, recipe, layout):
    """Loss and gradients as ranks compute them: whole-batch values first, then rows of micro-batches and shards."""
    masks = [np.array(s.mask, bool) for s in batch]
    value = advantages([s.reward for s in batch], [s.group for s in batch], recipe.estimator,
                       token_counts=[mask.sum() for mask in masks])  # fmt: skip
    weights = token_weights(masks, [s.group for s in batch], recipe.how, recipe.constant)
    factors = correction([str(row) for row in range(len(batch))], [np.array(s.old) for s in batch],
                         [np.array(s.engine) for s in batch], masks, recipe.off_policy)  # fmt: skip
    random, terms = np.random.default_rng(layout.seed), []
    gradients = [[np.zeros(len(mask)), np.zeros(len(mask))] for mask in masks]
    for members in layout.micro_batches:
        rows = [(m, t) for m in members for t in range(len(masks[m]))] + [(-1, 0)] * layout.padding
        rows = [rows[at] for at in random.permutation(len(rows))]
        owner = random.integers(0, layout.shards, len(rows))
        shards = [[row for row, own in zip(rows, owner, strict=True) if own == shard] for shard in range(layout.shards)]
        for shard, loss, pair, weight in run_shards(shards, batch, recipe, masks, value, weights, factors):
            (weight * loss).sum().backward()
            terms += (weight * loss).tolist()
            for (m, t), own, other in zip(shard, *(zero_if_none(leaf) for leaf in pair), strict=True):
                if m < 0 or not masks[m][t]:
                    assert own == 0
                    assert other == 0
                else:
                    gradients[m][0][t], gradients[m][1][t] = own, other
    return math.fsum(terms), gradients


def run_shards(shards, batch, recipe, masks, value, weights, factors):
    """Two passes, as an all-reduce has two sides: the first adds up what each shard gives, the second gets the mean."""
    totals, counts = {}, {m: int(mask.sum()) for m, mask in enumerate(masks)}

    def column(shard, of, *, poison=math.nan):
        return torch.tensor([of(m, t) if m >= 0 and masks[m][t] else poison for m, t in shard], dtype=torch.float64)

    def run(shard, sequence_mean):
        current = column(shard, lambda m, t: batch[m].current[t]).requires_grad_()
        entropy = column(shard, lambda m, t: batch[m].entropy[t], poison=math.inf).requires_grad_()
        inputs = LossInputs(
            current_T=current, entropy_T=entropy,
            divisor_T=column(shard, lambda m, t: batch[m].old[t], poison=-math.inf),
            advantage_T=column(shard, lambda m, t: value[m] * factors[m][t]),
            reference_T=column(shard, lambda m, t: batch[m].reference[t]),
            mask_T=torch.tensor([m >= 0 and bool(masks[m][t]) for m, t in shard], dtype=torch.bool),
            sequence_mean=sequence_mean,
        )  # fmt: skip
        return token_loss(recipe.loss, inputs, recipe.options), (current, entropy)

    for shard in shards:

        def give(value_T, shard=shard):
            for (m, t), number in zip(shard, value_T.tolist(), strict=True):
                if m >= 0 and masks[m][t]:
                    totals.setdefault(m, []).append(number)
            return torch.zeros_like(value_T)

        run(shard, give)
    for shard in shards:

        def take(value_T, shard=shard):
            return torch.tensor([math.fsum(totals[m]) / counts[m] if totals.get(m) else math.nan for m, _ in shard],
                                dtype=torch.float64)  # fmt: skip

        loss, pair = run(shard, take)
        weight = torch.tensor([weights[m][t] if m >= 0 else 0.0 for m, t in shard], dtype=torch.float64)
        yield shard, loss, pair, weight
