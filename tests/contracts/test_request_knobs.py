"""Knobs of a request that change a distribution are named by the engine that gives them to its library, and no others.

What this does not exercise: what vLLM's sampler makes of them (LGP004, in round trips).
"""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from verifier.engine.api import Sampling, Shape
from verifier.engine.engine_hf import _words
from verifier.engine.vllm.batch_vllm import shaped_by

KNOBS = {
    "temperature": 0.7, "top_p": 0.95, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.05, "presence_penalty": 0.2,
    "frequency_penalty": 0.2, "min_tokens": 2, "logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4],
}  # fmt: skip
SHAPES = {
    "top_k": 5, "top_p": 0.95, "min_p": 0.05, "repetition": 1.05, "presence": 0.2, "frequency": 0.2,
    "bias": ((3, 1.0),), "allowed": (3, 4), "least": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOBS)
def test_vllms_requests_name_what_changes_a_distribution(name):
    assert shaped_by(SamplingParams(**{name: KNOBS[name]})) == f"{name}={KNOBS[name]!r}"


def test_vllms_requests_name_neither_counts_nor_ends_nor_reports():
    asked = SamplingParams(
        n=2, seed=3, max_tokens=7, stop_token_ids=[1], ignore_eos=True, logprobs=1, prompt_logprobs=1, detokenize=False
    )  # fmt: skip
    assert shaped_by(asked) == ""


@pytest.mark.parametrize("name", SHAPES)
def test_requests_to_transformers_name_what_changes_a_distribution(name):
    assert _words(Sampling(seed=1, max_tokens=7, n=2, stop=(1,), shape=Shape(**{name: SHAPES[name]}))).startswith(name)


def test_requests_to_transformers_name_neither_counts_nor_ends():
    assert _words(Sampling(seed=1, max_tokens=7, n=2, stop=(1,))) == ""
    assert _words(Sampling(seed=1, max_tokens=7, temperature=0.7)) == "temperature=0.7"
