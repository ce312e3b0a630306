"""Every planted logprob bug is found within the CI profile's budget, and shrinks to its smallest logits.

Each bug is a small wrong implementation; it shows where it differs from the textbook in float64: in value, in gradient,
or in what it leaves of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from verifier.megatron.pack import IGNORE_LABEL
from verifier.megatron.vocab_logprob import vocab_parallel_logprob


@dataclass(frozen=True, slots=True)
class Problem:
    """Small whole logits, so that a shrunk case reads at a glance."""

    logits: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    temperature: float

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """([T, V] float64 logits, [T] labels)."""
        return torch.tensor(self.logits, dtype=torch.float64), torch.tensor(self.labels)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    temperature = draw(st.sampled_from([1.0, 2.0]))
    vocab = draw(st.integers(1, 4))
    row = st.tuples(st.integers(0, vocab - 1) | st.just(IGNORE_LABEL), st.tuples(*[st.integers(0, 3)] * vocab))
    labels, logits = zip(*draw(st.lists(row, min_size=1, max_size=4)), strict=True)
    return Problem(logits=logits, labels=labels, temperature=temperature)


Outputs = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor, float], Outputs]
"""(logits, labels, temperature) -> (log-probability, entropy)."""


def textbook(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    logp = torch.log_softmax(logits / temperature, -1)
    kept = labels != IGNORE_LABEL
    taken = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(kept, taken, 0), torch.where(kept, -(logp.exp() * logp).sum(-1), 0)


def shows(run: Run) -> Callable[[Problem], bool]:
    def differs(problem: Problem) -> bool:
        results = []
        for implementation in (run, textbook):
            logits, labels = problem.tensors()
            leaf = logits.clone().requires_grad_()
            fed = leaf * 1
            logprob, entropy = implementation(fed, labels, problem.temperature)
            (logprob + 2 * entropy).sum().backward()
            results.append((logprob.detach(), entropy.detach(), leaf.grad, fed.detach()))
        return any(not torch.allclose(got, want, rtol=1e-9, atol=1e-9) for got, want in zip(*results, strict=True))

    return differs


def right(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    return vocab_parallel_logprob(logits, labels, temperature=temperature, chunk_tokens=2)


def temperature_left_out(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    return textbook(logits, labels, 1.0)


def temperature_on_the_logprob(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    logprob, entropy = textbook(logits, labels, 1.0)
    return logprob / temperature, entropy


def logits_shifted_in_place(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    logprob, _ = textbook(logits.clone(), labels, temperature)
    with torch.no_grad():
        logits.exp_()
    return logprob, textbook(logits.clone(), labels, temperature)[1]


def greatest_instead_of_sampled(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    _, entropy = textbook(logits, labels, temperature)
    best = torch.log_softmax(logits / temperature, -1).amax(-1)
    return torch.where(labels != IGNORE_LABEL, best, 0), entropy


def ignored_label_read_as_token_zero(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    return textbook(logits, labels.clamp(min=0), temperature)


def last_part_of_a_chunk_left_out(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    whole = len(labels) // 2 * 2
    cut = torch.where(torch.arange(len(labels)) < whole, labels, IGNORE_LABEL)
    return textbook(logits, cut, temperature)


def entropy_without_gradient(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    logprob, entropy = textbook(logits, labels, temperature)
    return logprob, entropy.detach()


def gradient_not_scaled_by_temperature(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    scaled = logits + (logits / temperature - logits).detach()
    return textbook(scaled, labels, 1.0)


def normaliser_of_the_neighbour(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Outputs:
    scaled = logits / temperature
    kept = labels != IGNORE_LABEL
    taken = scaled.gather(1, labels.clamp(min=0)[:, None])[:, 0] - scaled.logsumexp(-1).roll(1)
    return torch.where(kept, taken, 0), textbook(logits, labels, temperature)[1]


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug, where it shipped, and the smallest problem on which it shows."""

    upstream: str
    run: Run
    smallest: Problem


X = IGNORE_LABEL
PLANTED = (
    Planted("trl#3029, NeMo-RL#935, verl#3133", temperature_left_out, Problem(((0, 0),), (0,), 2.0)),
    Planted("synthetic", temperature_on_the_logprob, Problem(((0, 0),), (0,), 2.0)),
    Planted("verl#1672, verl#2484", logits_shifted_in_place, Problem(((0,),), (X,), 1.0)),
    Planted("NeMo-RL#3297, trl#3867", greatest_instead_of_sampled, Problem(((0, 0),), (0,), 1.0)),
    Planted("synthetic", ignored_label_read_as_token_zero, Problem(((0, 0),), (X,), 1.0)),
    Planted("synthetic", last_part_of_a_chunk_left_out, Problem(((0, 0),), (0,), 1.0)),
    Planted("synthetic", entropy_without_gradient, Problem(((0, 1),), (0,), 1.0)),
    Planted("synthetic", gradient_not_scaled_by_temperature, Problem(((0, 0),), (0,), 2.0)),
    Planted("synthetic", normaliser_of_the_neighbour, Problem(((0,), (0,)), (0, X), 1.0)),
)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.run.__name__)
def test_found_and_shrunk_to_the_smallest_case(bug: Planted) -> None:
    assert find(problems(), shows(bug.run), settings=settings.get_profile("ci")) == bug.smallest


@given(problem=problems())
def test_the_implementation_itself_does_not_show(problem: Problem) -> None:
    assert not shows(right)(problem)
