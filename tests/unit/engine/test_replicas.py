"""What several engines are dealt of a batch, and how their answers are joined."""

from __future__ import annotations

import pytest

from verifier.engine.api import Sample, Sampling
from verifier.engine.replicas import deal, in_turn


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_prompt_has_the_seed_of_its_place_whatever_the_number_of_engines(count):
    prompts, sampling = [[place] for place in range(5)], Sampling(seed=11, n=3, max_tokens=4)
    found = {prompt[0]: own.of(at) for dealt, own in deal(prompts, sampling, count) for at, prompt in enumerate(dealt)}
    assert found == {place: sampling.of(place) for place in range(5)}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_generator_of_each_engine_has_a_seed_of_its_own(count):
    dealt = deal([[place] for place in range(5)], Sampling(seed=11, max_tokens=4, seeded=False), count)
    assert [own.seed for _, own in dealt] == [*range(11, 11 + count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_answers_come_back_in_the_order_of_the_batch(count):
    prompts = [[place] for place in range(5)]
    answers = [
        [Sample(tokens=tuple(prompt), logprobs=(0.0,))]
        for dealt, _ in deal(prompts, Sampling(seed=1, max_tokens=1), count)
        for prompt in dealt
    ]
    assert [list(samples[0].tokens) for samples in in_turn(answers, 5, count)] == prompts
