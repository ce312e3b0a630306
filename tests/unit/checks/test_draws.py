"""Fairness of draws by LGP011: the greatest variance at an entropy, seeds, answers that come twice, the sum of a step.

What this does not exercise: real runs (tests/dist/train_clean_case.py), and bugs that LGP011 catches (tests/faults).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.data.records import RequestSeeds, SamplingAsked
from verifier.stages.loss.records import LossRows
from verifier.stages.pack.records import Rollouts
from verifier.stages.rollout.checks_draws import _mixed, _won, answers_drawn_unfairly, greatest_variance
from verifier.stages.train.records import PreviousStep

VOCABULARY, TOKENS = 40, 400


@pytest.mark.parametrize("size", [3, 5, 12])
def test_no_distribution_of_two_values_varies_more(size):
    share = np.concatenate([np.logspace(-8, -0.01, 200), 1 - np.logspace(-8, -0.3, 200)])
    for some in range(1, size):
        for others in range(1, size - some + 1):
            first, second = np.log(share / some), np.log((1 - share) / others)
            entropy = -(share * first + (1 - share) * second)
            variance = share * (1 - share) * (first - second) ** 2
            assert (variance <= greatest_variance(entropy, size) + 1e-12).all()


@pytest.mark.parametrize("size", [5, 40, 3000])
def test_no_drawn_distribution_varies_more(size):
    random = np.random.default_rng(0)
    for spread in np.logspace(-1, 1.5, 100):
        logits = random.normal(size=size) * spread
        nats = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        entropy = float(-(np.exp(nats) * nats).sum())
        variance = float((np.exp(nats) * nats**2).sum()) - entropy**2
        assert variance <= greatest_variance(np.array([entropy]), size)[0] + 1e-7


def wrong(
    seeds: tuple[tuple[int, ...], ...] = ((12, 13),), answers: tuple[int, int] = (7, 8), **given: Any
) -> list[str]:
    """What is wrong with step 2 of two answers to one prompt; `given` has nats, reported nats and entropy of each."""
    nats, entropy = given.get("nats", np.full(TOKENS, -2.0)), given.get("entropy", np.full(TOKENS, 2.0))
    half, name = len(nats) // 2, "update 1"
    size, mask = half + 1, np.tile(np.arange(half + 1) > 0, 2)
    asked: dict[str, Any] = {
        "seed": 0, "batch_size": 3, "group_size": 2, "max_rounds": 1, "max_turns": 2, "temperature": 1.0,
        "max_answer_tokens": half, "end": 3, "vocab_size": VOCABULARY, "sent": (0, 1), **given.get("asked", {}),
    }  # fmt: skip
    records: list[Record] = [
        SamplingAsked(name="answers", version=2, **asked),
        RequestSeeds(name="round 0", version=2, round=0, turns=seeds, shaped=given.get("shaped", ())),
        PolicyColumns(
            name="policy inputs", version=2, ids=("a", "b"), lengths=(size, size), ratio_over="old", weight_level="",
            weight_cap=2.0, max_staleness=0, trained_version=1, array="all",
        ),
        LossColumns(
            name=name, version=2, aggregation="token_mean", ids=("a", "b"), groups=("g", "g"), lengths=(size, size)
        ),
        LossRows(name=name, version=2, coordinate="", array="rows"),
        Rollouts(
            name="trained", version=2, ids=("a", "b"), groups=("g", "g"), lengths=(size, size), prompt_lengths=(1, 1),
            rewards=(0.0, 0.0), array="all",
        ),
    ]  # fmt: skip
    records += [given["line"]] if "line" in given else []
    versions, padded = np.where(mask, 1, -1), np.full(2 * size, np.nan)
    padded[mask] = nats
    reported = np.full(2 * size, np.nan)
    reported[mask] = given.get("reported", nats)
    arrays = {
        "all": {
            "tokens": np.repeat(answers, size), "versions": versions, "version": versions, "sampled": mask,
            "logprobs": padded, "old": padded, "engine": reported,
        },
        "rows": {
            "sentinel": np.concatenate([(at << 32) + np.arange(1, size) for at in (1, 2)]), "current": nats,
            "mask": np.ones(len(nats), bool), "entropy": entropy,
        },
    }  # fmt: skip
    trace = Trace(Manifest(dtype="float32", config=given.get("config", {})), records, lambda key: arrays[key])
    return [item.what for item in answers_drawn_unfairly(trace) if not item.same]


SUM = ["log-probabilities of the tokens"]


def drawn(temperature: float, kept: int = VOCABULARY) -> dict[str, np.ndarray]:
    """Tokens of peaked distributions, drawn at a temperature from the likeliest, and what the trainer says of them."""
    random = np.random.default_rng(1)
    logits = random.normal(size=(TOKENS, VOCABULARY)) * 1.5
    nats = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    best = np.argsort(-logits, axis=1)[:, :kept]
    race = np.take_along_axis(logits, best, 1) / temperature + random.gumbel(size=(TOKENS, kept))
    chosen = np.take_along_axis(best, race.argmax(1)[:, None], 1)
    return {"nats": np.take_along_axis(nats, chosen, 1)[:, 0], "entropy": -(np.exp(nats) * nats).sum(1)}


def test_holds():
    assert not wrong()
    assert not wrong(**drawn(1.0))
    assert not wrong(((12, 13), (18, 21)))
    assert not wrong(())


def test_sure_tokens_hold():
    """Nothing unlikely came in 400 tokens of 1e-4 each, so that the sum of squares is far below the variance."""
    probability, others = 1 - 1e-4, 1e-4
    entropy = -probability * np.log(probability) - others * np.log(others / (VOCABULARY - 1))
    assert not wrong(nats=np.full(TOKENS, np.log(probability)), entropy=np.full(TOKENS, entropy))


@pytest.mark.parametrize(("temperature", "kept"), [(1e-3, VOCABULARY), (0.5, VOCABULARY), (2.0, VOCABULARY), (1.0, 5)])
def test_another_distribution_is_violated(temperature, kept):
    assert wrong(**drawn(temperature, kept)) == SUM
    assert not wrong(**drawn(temperature, kept), asked={"filtered": True})


def test_seeds_and_repeats_are_violated():
    assert wrong(((13, 14),)) == wrong(((12, 12),)) == ["seeds of round 0"]
    assert wrong(((12, 13), (13, 18))) == wrong(((12, 13), (19, 18))) == ["seeds of round 0, turn 1"]
    assert wrong(answers=(7, 7)) == ["answers to g"]
    assert not wrong(answers=(7, 7), nats=np.full(TOKENS, -0.01), entropy=np.full(TOKENS, 0.01))


def test_requests_without_seeds_are_judged_as_such():
    config = {"grpo": {"request_seeds": False}}
    assert wrong(((-1, -1),), config=config) == []
    assert wrong(((-1, 13),), config=config) == ["seeds of round 0"]
    assert wrong(((-1, -1),)) == ["seeds of round 0"]


def test_engines_whose_generators_have_one_seed_are_violated():
    config = {"grpo": {"request_seeds": False}}
    two = {"asked": {"group_size": 1, "batch_size": 3, "replicas": 2}, "config": config}
    assert wrong(((-8, -9),), **two) == wrong(((-1, -9),), **two) == []
    assert wrong(((-8, -8),), **two) == ["seeds of round 0"]
    assert wrong(((-8, -9), (-8, -9)), **two) == ["seeds of round 0, turn 1"]
    assert wrong(((-8, -9), (-11, -12)), **two) == []
    assert wrong(((-8, -8),), asked={"batch_size": 3, "replicas": 2}, config=config) == []


def test_knobs_that_the_config_does_not_ask_for_are_violated():
    assert not wrong(shaped=("",))
    assert wrong(shaped=("", "repetition_penalty=1.05")) == ["requests of round 0"]
    assert wrong(shaped=("",), asked={"temperature": 0.7}) == ["requests of round 0"]
    assert not wrong(shaped=("temperature=0.7",), asked={"temperature": 0.7})


def test_answers_name_the_adapter_of_the_version_that_their_tokens_claim():
    lora, one = {"lora": {"rank": 8, "sync": "adapter"}}, "adapter=version-000001"
    assert not wrong(shaped=(one,), config=lora)
    assert not wrong(shaped=(f"{one}, temperature=0.7",), config=lora, asked={"temperature": 0.7})
    for found in ("", "adapter=version-000000", "adapter=policy"):
        assert wrong(shaped=(one, found), config=lora) == ["requests of round 0"]
    assert wrong(shaped=(one,)) == wrong(shaped=(one,), config={"lora": {"rank": 8, "sync": "merged"}})
    assert wrong(shaped=(one,)) == ["requests of round 0"]


def test_a_version_without_an_update_is_sampled_by_the_adapter_sent_before_it():
    lora, zero = {"lora": {"rank": 8, "sync": "adapter"}}, "adapter=version-000000"
    assert not wrong(shaped=(zero,), config=lora, asked={"sent": (0,)})
    assert wrong(shaped=("adapter=version-000001",), config=lora, asked={"sent": (0,)}) == ["requests of round 0"]
    line = PreviousStep(name="step", version=1, updated=True, here=False)
    assert wrong(shaped=(zero,), config=lora, asked={"sent": (0,)}, line=line) == ["requests of round 0"]
    for sent in ((), (2,)):  # of an older trace, and of a batch that a checkpoint has
        assert not wrong(shaped=(zero,), config=lora, asked={"sent": sent})
        assert wrong(shaped=(f"{zero}, top_k=5",), config=lora, asked={"sent": sent}) == ["requests of round 0"]


ALL, ONE = "reports of the sampled tokens", "reports of the sampled tokens of b"


def softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities [T, V]."""
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def reported(temperature: float, drawn_at: float, moved: float) -> dict[str, np.ndarray]:
    """Tokens that are drawn at a temperature and reported at another one, and scored by weights that have moved."""
    random = np.random.default_rng(2)
    logits = random.normal(size=(TOKENS, VOCABULARY)) * 1.5
    scored = softmax((logits + random.normal(size=logits.shape) * moved) / drawn_at)
    chosen = (softmax(logits / drawn_at) + random.gumbel(size=logits.shape)).argmax(axis=1)[:, None]
    said = softmax(logits / temperature)
    nats, told = (np.take_along_axis(each, chosen, 1)[:, 0] for each in (scored, said))
    return {"nats": nats, "reported": told, "entropy": -(np.exp(scored) * scored).sum(axis=1)}


def of_old_weights(**given: Any) -> list[str]:
    return [item for item in wrong(**given) if item not in SUM]


@pytest.mark.parametrize("moved", [0.0, 0.3, 1.0, 3.0])
def test_reports_by_weights_that_have_moved_hold(moved):
    assert not of_old_weights(**reported(1.0, 1.0, moved))
    assert not of_old_weights(**reported(0.7, 0.7, moved))


def test_a_likeliest_winner_of_the_bet_is_within_the_bound():
    """Of 4,000 steps, bets reach 5 nats no more often than e^-5 of them."""
    random, reached = np.random.default_rng(3), 0
    said, scored = (softmax(random.normal(size=(1, VOCABULARY)))[0] for _ in range(2))
    for _ in range(4000):
        chosen = random.choice(VOCABULARY, size=50, p=np.exp(said))
        won = _won((scored - said)[chosen], np.zeros(50, np.int64), 1)
        reached += float(_mixed(won)[0]) > 5
    assert reached <= 4000 * np.exp(-5) + 3 * np.sqrt(4000 * np.exp(-5))


@pytest.mark.parametrize("moved", [0.0, 0.3])
@pytest.mark.parametrize(("temperature", "drawn_at"), [(1.0, 0.5), (0.5, 1.0)])
def test_reports_at_another_temperature_are_violated(temperature, drawn_at, moved):
    given = reported(temperature, drawn_at, moved)
    assert ALL in of_old_weights(**given)
    assert not of_old_weights(**given, asked={"filtered": True})


def test_reports_of_other_tokens_are_violated():
    given = reported(1.0, 1.0, 0.3)
    assert ALL in of_old_weights(**given | {"reported": np.roll(given["reported"], 1)})
    half = TOKENS // 2
    one = np.concatenate([given["reported"][:half], np.roll(given["reported"][half:], 1)])
    assert ONE in of_old_weights(**given | {"reported": one})


def test_a_report_of_nothing_is_violated():
    given = reported(1.0, 1.0, 0.3)
    assert ALL in of_old_weights(**given | {"reported": np.full(TOKENS, -1e6)})
