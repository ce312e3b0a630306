"""Requests of a round trip: they go on behind the model's end tokens, which no shaped sample may begin with either.

What this does not exercise: engines, which answer them (tests/dist/test_roundtrip.py).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from verifier.engine.api import Sample, Sampling, Shape
from verifier.runs.engine_requests import EngineRequests

PROMPTS = [[5, 6, 7, 8] * 5, [9, 4, 3, 11] * 5, [7, 9, 12, 10] * 5]
ENDS = (1, 2)


class Client:
    """Answers with the first allowed length of token 6, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sampling] = []
        self.single: list[Sampling] = []

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0] * (len(tokens) - 1) for tokens in sequences]

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Sample]]:
        self.asked += sampling.each or [sampling]
        self.single += [sampling] if len(prompts) == 1 else []
        found = []
        for index in range(len(prompts)):
            request = sampling.of(index)
            tokens = (6,) * request.max_tokens
            sample = Sample(tokens=tokens, logprobs=(-1.0,) * len(tokens), cached_tokens=0, ended="length")
            found.append([sample] * request.n)
        return found


def test_no_request_ends_at_an_end_token_of_the_model() -> None:
    client, probe = Client(), Probe()
    requests = EngineRequests(client, probe, 0, 7, 64, ENDS, more=True)  # type: ignore[arg-type]
    requests.sample(PROMPTS)
    assert len(client.asked) > 8
    assert all(item.ignore_end for item in client.asked)


def test_before_the_least_length_no_end_token_is_sampled() -> None:
    client = Client()
    EngineRequests(client, Probe(), 0, 7, 64, ENDS, more=True).sample(PROMPTS)  # type: ignore[arg-type]
    least = [item for item in client.asked if item.shape.least]
    assert [set(ENDS) < {*item.stop, *item.ends} for item in least] == [True, True]
    assert [set(ENDS) & set(item.stop) for item in least] == [set(ENDS), set()]


def test_every_option_is_asked_for_by_a_request_with_no_other_in_a_batch_of_its_own() -> None:
    client = Client()
    EngineRequests(client, Probe(), 0, 7, 64, ENDS, more=True).sample(PROMPTS)  # type: ignore[arg-type]
    neutral = asdict(Shape())
    changed = [{key for key, value in asdict(item.shape).items() if value != neutral[key]} for item in client.single]
    assert {field for (field,) in filter(None, changed)} == set(neutral)


class Probe:
    """Takes evidence."""

    def emit(self, *_: Any) -> None: ...
