"""Scale of float32's rounding at each place, as the oracle measures it, against distances that it was not made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from verifier.core.records_tokens import ROUNDINGS
from verifier.model.tiny import write_tiny
from verifier.model.transformers_hf import load_model
from verifier.oracle.logprob_hf import longest_of, score, score_twice

SEQUENCES = [np.random.default_rng(seed).integers(0, 300, 60).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("tiny"))


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row])


def test_it_is_the_spread_of_what_tokens_are_off_by(path: Path) -> None:
    exact, other, scales = score_twice(None, str(path), SEQUENCES)
    assert exact == score(None, str(path), SEQUENCES, "float32")
    gaps = np.abs(flat(exact) - flat(other)) / flat(scales)
    assert 0.8 < np.sqrt((gaps**2).mean()) < 1.4
    assert gaps.max() < ROUNDINGS / 2


def test_a_temperature_divides_it(path: Path) -> None:
    (_, _, one), (_, _, half) = (score_twice(None, str(path), SEQUENCES[:1], temperature=t) for t in (1.0, 0.5))
    ratios = flat(half) / flat(one)  # not 2 at each place: the mean by the distribution, which is left out, differs
    assert np.median(ratios) == pytest.approx(2, rel=0.05)


@torch.inference_mode()
def test_every_token_of_the_vocabulary_stays_within_the_bound_under_other_kernels(path: Path) -> None:
    """Sums in another order, of some 180,000 log-probabilities: their spread is below a seventh of the bound."""
    _, _, scales = score_twice(None, str(path), SEQUENCES)
    model = load_model(path, torch.float32)
    rows = [torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0, :-1].double(), -1) for row in SEQUENCES]
    model.set_attn_implementation("sdpa")
    batch = torch.log_softmax(model(input_ids=torch.tensor(SEQUENCES)).logits[:, :-1].double(), -1)
    own = torch.tensor(flat(scales)).view(len(rows), -1, 1)
    gaps = (batch - torch.stack(rows)).abs() / own.clamp(min=float(own.square().mean().sqrt()))
    assert 0.5 < float(gaps.square().mean().sqrt()) < ROUNDINGS / 7
    assert float(gaps.max()) < ROUNDINGS


def test_a_wrong_epsilon_is_beyond_the_bound(path: Path) -> None:
    exact, _, scales = score_twice(None, str(path), SEQUENCES)
    model = load_model(path, torch.float32)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5  # it is 1e-6
    with torch.inference_mode():
        every = torch.log_softmax(model(input_ids=torch.tensor(SEQUENCES)).logits[:, :-1].double(), -1)
    wrong = every.gather(2, torch.tensor(SEQUENCES)[:, 1:, None]).flatten().numpy()
    assert np.max(np.abs(wrong - flat(exact)) / flat(scales)) > 2 * ROUNDINGS


def test_what_another_sequence_begins_with_is_computed_once_and_scored_the_same(path: Path) -> None:
    first, second = SEQUENCES[:2]
    asked = [first[:20], second, first, first[:40], first]
    assert longest_of(asked) == [4, 1, 4, 4, 4]
    temperatures = [1.0, 1.0, 0.5, 2.0, 0.0]
    together = score_twice(None, str(path), asked, temperature=temperatures)
    for at, (tokens, temperature) in enumerate(zip(asked, temperatures, strict=True)):
        alone = score_twice(None, str(path), [tokens], temperature=temperature)
        assert together[1][at] == pytest.approx(alone[1][0], abs=1e-12)
        assert np.abs(np.subtract(together[0][at], alone[0][0])).max() < ROUNDINGS * max(alone[2][0])
