"""Cached tokens of a prompt (LGP003, LGP011): no more than it has in common with what came before on the same weights.

What this does not exercise: vLLM's own cache, which a round trip has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence

import pytest

from verifier.core.check import At, Stage
from verifier.core.prefixes import Asked
from verifier.runs.engine_requests import like
from verifier.stages.rollout.checks_samples import compare_cached

Tokens = tuple[int, ...]
BLOCK = 32
DRAW = random.Random(3)
PROMPT = tuple(DRAW.randrange(500) for _ in range(9 * BLOCK + 1))
PROMPTS = [PROMPT, *map(tuple, like(PROMPT, 500))]


class Cache:
    """A prefix cache of whole blocks, each known by a hash of the one before it and its tokens."""

    def __init__(self, of_block: Callable[[Hashable, Tokens], Hashable]) -> None:
        self._of_block, self._known = of_block, set[Hashable]()

    def ask(self, prompt: Sequence[int]) -> int:
        """Return the number of cached tokens, and keep the prompt's blocks."""
        keys, parent = [], None
        for at in range(0, len(prompt) - BLOCK + 1, BLOCK):
            parent = self._of_block(parent, tuple(prompt[at : at + BLOCK]))
            keys.append(parent)
        hits = next((at for at, key in enumerate(keys) if key not in self._known), len(keys))
        self._known |= {*keys}
        return min(hits, (len(prompt) - 1) // BLOCK) * BLOCK


def same(of_block: Callable[[Hashable, Tokens], Hashable], *, resets: bool = True) -> bool:
    """The verdict on two versions of the weights, each of which is asked all prompts."""
    cache, asked, found = Cache(of_block), Asked(), []
    for version in range(2):
        for prompt in PROMPTS:
            cached, common = cache.ask(prompt), asked.common([prompt], [[(7, 8)]])
            found += compare_cached(At(Stage.ROLLOUT, version), "some", [cached], common)
        cache, asked = (Cache(of_block) if resets else cache), Asked()
    assert len(found) == 2 * len(PROMPTS)
    return all(item.same for item in found)


def test_a_cache_that_knows_blocks_by_all_before_them_is_within_the_bound() -> None:
    assert same(lambda parent, block: (parent, block))


@pytest.mark.parametrize(
    ("of_block", "resets"),
    [
        pytest.param(lambda parent, block: (parent, block[:-1]), True, id="hash-without-the-last-token"),
        pytest.param(lambda _, block: block, True, id="hash-without-the-block-before"),
        pytest.param(lambda parent, block: (parent, block), False, id="kept-at-a-sync"),
    ],
)
def test_a_cache_that_takes_one_prompt_for_another_is_seen(
    of_block: Callable[[Hashable, Tokens], Hashable], resets: bool
) -> None:
    assert not same(of_block, resets=resets)


def test_prompts_of_one_batch_count_for_each_other_and_the_last_token_never() -> None:
    asked = Asked()
    assert asked.common([(1, 2, 3), (1, 2, 4), (5, 6)], [[(9,)], [(9,)], [(9,), (8,)]]) == [2, 2, 1]
    assert asked.common([(1, 2, 3, 9, 4)], [[(7,)]]) == [4]
    asked = Asked()
    asked.add([(1, 2)])
    assert asked.common([(1, 2, 3), (4,)], [[(9,)], [(9,)]]) == [2, 0]


def test_nobody_judges_answers_of_which_nobody_knows_what_they_have_in_common() -> None:
    assert not list(compare_cached(At(Stage.ROLLOUT, 1), "some", [32], [-1]))
