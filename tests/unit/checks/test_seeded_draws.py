"""LGP018 on a toy sampler of races: rounding holds, seeds that are ignored or exchanged when rows move do not.

What this does not exercise: vLLM's sampler (tests/faults).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from tests.snapshots.check_traces import MANIFEST
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.trace import Trace
from verifier.stages.rollout.checks_draws import seeded_sample_not_repeated
from verifier.stages.rollout.records import SampledTokens

VOCABULARY, LENGTH, REQUESTS = 200, 12, 16
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
"""[last token, next token] logits."""
Row = Callable[[int, int], int]
"""(request, place) -> the request whose generator serves it."""


def answers(name: str, row: Row, *, noise: float = 0.0, seeds: int | None = 0, global_seed: int = 0) -> SampledTokens:
    """Answers to as many requests of one prompt each; `row` says whose generator draws."""
    number = torch.Generator().manual_seed(global_seed)
    generators = [torch.Generator().manual_seed(1000 + at) for at in range(REQUESTS)]
    tokens: list[list[int]] = [[] for _ in range(REQUESTS)]
    for place in range(LENGTH):
        drawn = []
        for at in range(REQUESTS):
            logits = TABLE[tokens[at][-1] if place else at] + noise * torch.randn(VOCABULARY, generator=number)
            share = logits.softmax(dim=-1)
            used = number if global_seed else generators[row(at, place)]
            drawn.append(int((share / torch.empty_like(share).exponential_(generator=used)).argmax()))
        for at, token in enumerate(drawn):
            tokens[at].append(token)
    return SampledTokens(
        name=name, version=1, role="engine", array=name, lengths=(LENGTH,) * REQUESTS,
        prompts=tuple((at,) for at in range(REQUESTS)), tokens=tuple(map(tuple, tokens)), stops=((),) * REQUESTS,
        limits=(LENGTH,) * REQUESTS, ended=("length",) * REQUESTS, temperatures=(1.0,) * REQUESTS,
        seeds=tuple(None if seeds is None else 1000 + at for at in range(REQUESTS)),
    )  # fmt: skip


def outcome(*records: SampledTokens) -> Outcome:
    return run_check(REGISTRY["LGP018"], Trace(MANIFEST, list(records), {}.__getitem__))


def own(request: int, place: int) -> int:
    return request


FIRST = answers("first", own)


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_rounding_holds(noise: float) -> None:
    assert outcome(FIRST, answers("again", own, noise=noise)).verdict is Verdict.HOLDS


def test_an_answer_that_ends_sooner_holds() -> None:
    again = answers("again", own)
    assert outcome(FIRST, replace(again, tokens=tuple(row[:5] for row in again.tokens))).verdict is Verdict.HOLDS


def test_one_turned_draw_holds() -> None:
    again = answers("again", own)
    one = ((*again.tokens[0][:-1], VOCABULARY), *again.tokens[1:])
    assert outcome(FIRST, replace(again, tokens=one)).verdict is Verdict.HOLDS


def test_seeds_that_are_ignored_are_seen() -> None:
    assert outcome(FIRST, answers("again", own, global_seed=7)).verdict is Verdict.VIOLATED


def test_generators_exchanged_when_rows_move_are_seen() -> None:
    """From the tenth token on four requests draw with the generator of the next row."""
    moved = answers("again", lambda request, place: (request + 1) % 4 if place > 8 and request < 4 else request)
    found = outcome(FIRST, moved)
    assert found.verdict is Verdict.VIOLATED
    assert "4 of 16 samples" in str(found)


def test_requests_without_a_seed_or_of_other_prompts_are_no_pairs() -> None:
    other = answers("again", own, seeds=None, global_seed=7)
    prompts = replace(answers("again", own, global_seed=7), prompts=tuple((at + 50,) for at in range(REQUESTS)))
    for again in (other, prompts):
        assert not [*seeded_sample_not_repeated(Trace(MANIFEST, [FIRST, again], {}.__getitem__))]
