"""Numbers of sequences that get a CUDA graph: vLLM's own up to 512, and some above.

What this does not exercise: a capture, which needs a GPU (tests/h100/test_engine_options.py, test_rollout_speed.py).
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from verifier.engine.vllm.engine_vllm import _graph_sizes


def test_few_sequences_have_the_sizes_of_round_trips():
    assert _graph_sizes(1) == _graph_sizes(16) == [1, 2, 4, 8, 16]


def test_up_to_512_they_are_those_of_vllm():
    assert _graph_sizes(512) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


@pytest.mark.parametrize(("most", "last"), [(20, 20), (600, 600), (1024, 1024), (5000, 1024)])
def test_the_greatest_is_what_an_engine_samples_or_the_bound(most, last):
    sizes = _graph_sizes(most)
    assert sizes[-1] == last
    assert sizes == sorted(set(sizes))
    assert max(after - before for before, after in pairwise(sizes)) <= 32
