"""LGP004 and LGP005: samples against their distribution and against each other, and what chance allows them to be."""

from __future__ import annotations

import random

import pytest
import torch

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_tokens import DrawnTokens, OracleOfNext
from verifier.core.trace import Trace

WIDE = torch.softmax(torch.randn(512, generator=torch.Generator().manual_seed(3)).double(), dim=0)
PEAKED = torch.tensor([0.999, 0.0005, 0.0005]).double()
FEW = torch.full((4,), 0.25).double()
ONE = torch.tensor([1.0, 0.0]).double()
DRAWS = 512


def verdict(code: str, tokens: list[int], shares: torch.Tensor = WIDE, likely: tuple[int, ...] = ()) -> Verdict:
    drawn = DrawnTokens(
        name="drawn", role="engine", prompt=(1,), tokens=tuple(tokens), temperature=1.0,
        bias=tuple((token, 1.0) for token in likely),
    )  # fmt: skip
    following = OracleOfNext(name="drawn", role="oracle", array="shares")
    arrays = {"array": shares.log().numpy()}
    outcome = run_check(REGISTRY[code], Trace(Manifest(complete=True), [drawn, following], lambda key: arrays))
    assert outcome.error is None
    assert outcome.num_compared == (2 if code == "LGP004" else 1)  # ids, and how they are spread
    return outcome.verdict


def draws(shares: torch.Tensor, seed: int, number: int = DRAWS) -> list[int]:
    return random.Random(seed).choices(range(len(shares)), weights=shares.tolist(), k=number)


@pytest.mark.parametrize("code", ["LGP004", "LGP005"])
@pytest.mark.parametrize("shares", [WIDE, PEAKED, FEW, ONE], ids=["wide", "peaked", "few", "one"])
def test_samples_of_the_distribution_itself_are_allowed(code: str, shares: torch.Tensor) -> None:
    assert all(verdict(code, draws(shares, seed), shares) is Verdict.HOLDS for seed in range(100))


def other(name: str) -> torch.Tensor:
    order = WIDE.argsort(descending=True)
    kept = torch.zeros_like(WIDE)
    if name == "temperature":
        return WIDE ** (1 / 0.6)
    if name == "top-p":
        inside = order[WIDE[order].cumsum(0) < 0.95]
        kept[inside] = WIDE[inside]
    elif name == "top-k":
        kept[order[:100]] = WIDE[order[:100]]
    else:
        kept[order[7]] = 1.0
    return kept


@pytest.mark.parametrize("name", ["temperature", "top-p", "top-k", "one seed"])
def test_samples_of_another_distribution_are_not_and_depend_on_nothing_else(name: str) -> None:
    kept = other(name)
    assert all(verdict("LGP004", draws(kept, seed)) is Verdict.VIOLATED for seed in range(20))
    assert all(verdict("LGP005", draws(kept, seed)) is Verdict.HOLDS for seed in range(20))


def test_an_id_at_the_edge_that_is_never_drawn_is_seen_where_the_request_makes_it_likely() -> None:
    edges = torch.cat([torch.full((4,), 0.24), torch.full((4,), 0.01)]).double()
    for seed in range(20):
        without = [token for token in draws(edges, seed, 400) if token != 3][:256]
        assert verdict("LGP004", without, edges, (0, 1, 2, 3)) is Verdict.VIOLATED
        assert verdict("LGP004", draws(edges, seed, 256), edges, (0, 1, 2, 3)) is Verdict.HOLDS


def test_an_id_beyond_the_vocabulary_is_seen() -> None:
    assert verdict("LGP004", [*draws(WIDE, 0), len(WIDE)]) is Verdict.VIOLATED


def shared(name: str, seed: int) -> list[int]:
    half = draws(WIDE, seed, DRAWS // 2)
    if name == "both requests":
        return half * 2
    if name == "the next request begins one later":
        return [*half, *half[1:], draws(WIDE, seed + 1, 1)[0]]
    if name == "two samples each":
        return [token for token in half for _ in range(2)]
    return half[: DRAWS // 8] * 8


@pytest.mark.parametrize(
    "name", ["both requests", "the next request begins one later", "two samples each", "eight chunks"]
)
def test_samples_that_share_their_seeds_are_seen(name: str) -> None:
    assert all(verdict("LGP005", shared(name, seed)) is Verdict.VIOLATED for seed in range(20))
