"""LGP004: samples counted in runs of a distribution, and what chance allows them to be."""

from __future__ import annotations

import random

import pytest
import torch

from verifier.checks.logprob import LEAST, _chance, _runs

SHARES = torch.softmax(torch.randn(512, generator=torch.Generator().manual_seed(3)).double(), dim=0)
DRAWS = 512


def statistic(tokens: list[int]) -> float:
    wanted, found = _runs(SHARES, tokens)
    return sum((got - want) ** 2 / want for want, got in zip(wanted, found, strict=True))


def draws(shares: torch.Tensor, seed: int) -> list[int]:
    return random.Random(seed).choices(range(len(shares)), weights=shares.tolist(), k=DRAWS)


def test_runs_hold_every_sample_and_are_never_short() -> None:
    for shares in (SHARES, torch.tensor([0.999, 0.0005, 0.0005]).double(), torch.full((4,), 0.25).double()):
        wanted, found = _runs(shares, [0] * DRAWS)
        assert sum(found) == DRAWS
        assert sum(wanted) == pytest.approx(DRAWS)
        assert all(want >= LEAST for want in wanted)


def test_samples_of_the_distribution_itself_are_allowed() -> None:
    assert max(statistic(draws(SHARES, seed)) for seed in range(300)) < _chance(5).absolute


@pytest.mark.parametrize("name", ["temperature", "top-p", "top-k", "one seed"])
def test_samples_of_another_distribution_are_not(name: str) -> None:
    order = SHARES.argsort(descending=True)
    kept = torch.zeros_like(SHARES)
    if name == "temperature":
        kept = SHARES ** (1 / 0.6)
    elif name == "top-p":
        inside = order[SHARES[order].cumsum(0) < 0.8]
        kept[inside] = SHARES[inside]
    elif name == "top-k":
        kept[order[:100]] = SHARES[order[:100]]
    else:
        kept[order[7]] = 1.0
    assert all(statistic(draws(kept, seed)) > _chance(5).absolute for seed in range(20))
