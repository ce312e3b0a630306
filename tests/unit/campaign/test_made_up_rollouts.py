"""Made-up rollouts fill every micro-batch to its budget, with lengths that differ."""

import pytest

from verifier.campaign.sweep.layouts import lengths_of, made_up
from verifier.megatron.microbatch import split_by_tokens
from verifier.megatron.token_layout import Alignment


@pytest.mark.parametrize(("tp", "cp", "dp", "each"), [(1, 1, 1, 2), (2, 1, 2, 3), (1, 2, 2, 1), (2, 2, 1, 4)])
@pytest.mark.parametrize("budget", [64, 1024, 8_000])
def test_every_micro_batch_is_full(tp, cp, dp, each, budget):
    alignment = Alignment(tp=tp, cp=cp, sp=tp > 1)
    multiple = alignment.total_multiple
    rollouts = made_up(budget, copies=dp * each, longest=500, multiple=multiple, vocabulary=100, seed=3)
    split = split_by_tokens(rollouts, dp=dp, max_tokens=budget, alignment=alignment)
    assert [len(rank) for rank in split] == [each] * dp
    for batch in (batch for rank in split for batch in rank):
        assert sum(-(-len(rollouts[index]) // multiple) * multiple for index in batch) == budget


def test_lengths_vary_and_are_a_function_of_the_seed():
    lengths = lengths_of(65_536, longest=2048, multiple=4, seed=1)
    assert lengths == lengths_of(65_536, longest=2048, multiple=4, seed=1)
    assert lengths != lengths_of(65_536, longest=2048, multiple=4, seed=2)
    assert max(lengths) <= 2048
    assert len(set(lengths)) > len(lengths) // 2


def test_tokens_are_in_the_vocabulary_and_a_quarter_is_the_prompt():
    for rollout in made_up(1000, copies=2, longest=100, multiple=1, vocabulary=7, seed=1):
        assert set(rollout.tokens.tolist()) <= set(range(7))
        assert rollout.prompt_length == max(1, len(rollout) // 4)
