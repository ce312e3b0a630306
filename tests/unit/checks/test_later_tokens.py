"""LGP004 on samples of several tokens, drawn from a toy whose next token depends on the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, MANIFEST, clean
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.trace import Trace
from verifier.oracle import logprob_hf
from verifier.stages.logprob.records import OracleOfPlaces
from verifier.stages.rollout.records import SampledTokens

VOCABULARY, LENGTH, SAMPLES, TEMPERATURE = 200, 16, 32, 2.0
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
"""[last token, next token] logits."""
Rule = Callable[[torch.Tensor, int, torch.Generator], torch.Tensor]
"""(probabilities [V], place, generator) -> weights of a race, [V]."""


def right(share: torch.Tensor, place: int, generator: torch.Generator) -> torch.Tensor:
    return share / torch.empty_like(share).exponential_(generator=generator)


def greedy_later(share: torch.Tensor, place: int, generator: torch.Generator) -> torch.Tensor:
    return share if place else right(share, place, generator)


def among_the_likeliest_later(share: torch.Tensor, place: int, generator: torch.Generator) -> torch.Tensor:
    kept = share >= share.sort(descending=True).values[40 if place else -1]
    return right(share * kept, place, generator)


def seeded_anew(share: torch.Tensor, place: int, generator: torch.Generator) -> torch.Tensor:
    """Every token after the first is drawn with the same noise."""
    return right(share, place, generator.manual_seed(generator.initial_seed()) if place else generator)


def temperature_of_first_token_only(share: torch.Tensor, place: int, generator: torch.Generator) -> torch.Tensor:
    other = share.pow(TEMPERATURE)  # in proportion to the softmax at a temperature of 1
    return right(other / other.sum() if place else share, place, generator)


def outcome_of(rule: Rule, seed: int, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Outcome of the check where an engine samples by the rule."""
    rows = []
    for sample in range(SAMPLES):
        generator, tokens = torch.Generator().manual_seed(1000 * seed + sample), [sample % VOCABULARY]
        for place in range(LENGTH):
            share = torch.softmax(TABLE[tokens[-1]] / TEMPERATURE, dim=-1)
            tokens.append(int(rule(share, place, generator).argmax()))
        rows.append([tokens[:1], tokens[1:], TEMPERATURE])

    class Toy:
        device, head_unit, model = torch.device("cpu"), None, None
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))

        def hidden(self, ids: torch.Tensor, past: None) -> torch.Tensor:
            return ids[..., None]

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return TABLE[hidden[:, 0]]

        def weights_of(self, unit: None) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    monkeypatch.setattr(logprob_hf, "StreamedModel", lambda path, dtype, device: Toy())
    monkeypatch.setattr(logprob_hf, "remembers", lambda model: False)
    sequences = [[*prompt, *tokens] for prompt, tokens, _ in rows]
    asked = (sequences, "bfloat16", "cpu", TEMPERATURE)
    *_, described = logprob_hf.sides(None, "", *asked, sampled=[LENGTH] * SAMPLES)
    found = zip(*chain.from_iterable(described), strict=True)
    names = ("rank", "kept", "rest", "earlier", "repeats")
    arrays = {name: np.array(column) for name, column in zip(names, found, strict=True)}
    sampled = SampledTokens(
        name="long", version=1, role="engine", lengths=(LENGTH,) * SAMPLES, prompts=tuple((row[0][0],) for row in rows),
        tokens=tuple(tuple(row[1]) for row in rows), stops=((),) * SAMPLES, limits=(LENGTH,) * SAMPLES,
        ended=("length",) * SAMPLES, temperatures=(TEMPERATURE,) * SAMPLES,
    )  # fmt: skip
    places = OracleOfPlaces(name="long", version=1, role="oracle", array="toy", vocabulary=len(TABLE))
    records = [*clean(), sampled, places]
    trace = Trace(MANIFEST, records, {**ARRAYS, "toy": arrays}.__getitem__)
    return run_check(REGISTRY["LGP004"], trace)


def test_right_samples_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        assert outcome_of(right, seed, monkeypatch).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (greedy_later, "are not spread as the policy's distributions"),
        (among_the_likeliest_later, "are not spread as the policy's distributions"),
        (temperature_of_first_token_only, "are not spread as the policy's distributions"),
        (seeded_anew, "tokens repeat the one sampled"),
    ],
)
def test_tokens_after_the_first_from_another_distribution(
    rule: Rule, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(rule, 0, monkeypatch)
    assert outcome.verdict is Verdict.VIOLATED
    assert any(said in item.sentence for item in outcome.finding.bad)
