"""Scale of float32's rounding at each place, as the oracle measures it, against distances that it was not made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verifier.model.tiny import write_tiny
from verifier.model.transformers_hf import load_model
from verifier.oracle import logprob_hf as module
from verifier.oracle.batches_hf import alike
from verifier.oracle.logprob_hf import longest_of, score, sides
from verifier.oracle.oracle import DRAWS, NEAR
from verifier.stages.logprob.records import ROUNDINGS, SHARES

SEQUENCES = [np.random.default_rng(seed).integers(0, 300, 60).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("tiny"))


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row])


def score_twice(path: Path, sequences: list[list[int]], temperature: Any = 1.0) -> list[list[list[float]]]:
    return sides(None, str(path), sequences, "float64", temperature=temperature)[0]


def test_it_is_the_spread_of_what_tokens_are_off_by(path: Path) -> None:
    exact, other, scales = score_twice(path, SEQUENCES)
    assert exact == score(None, str(path), SEQUENCES, "float32")
    gaps = np.abs(flat(exact) - flat(other)) / flat(scales)
    assert 0.8 < np.sqrt((gaps**2).mean()) < 1.4
    assert gaps.max() < ROUNDINGS / 2


def test_a_temperature_divides_it(path: Path) -> None:
    (_, _, one), (_, _, half) = (score_twice(path, SEQUENCES[:1], temperature=t) for t in (1.0, 0.5))
    ratios = flat(half) / flat(one)  # not 2 at each place: the mean by the distribution, which is left out, differs
    assert np.median(ratios) == pytest.approx(2, rel=0.05)


@torch.inference_mode()
def test_every_token_of_the_vocabulary_stays_within_the_bound_under_other_kernels(path: Path) -> None:
    """Sums in another order, of some 180,000 log-probabilities: their spread is below a seventh of the bound."""
    _, _, scales = score_twice(path, SEQUENCES)
    model = load_model(path, torch.float32)
    rows = [torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0, :-1].double(), -1) for row in SEQUENCES]
    model.set_attn_implementation("sdpa")
    batch = torch.log_softmax(model(input_ids=torch.tensor(SEQUENCES)).logits[:, :-1].double(), -1)
    own = torch.tensor(flat(scales)).view(len(rows), -1, 1)
    gaps = (batch - torch.stack(rows)).abs() / own.clamp(min=float(own.square().mean().sqrt()))
    assert 0.5 < float(gaps.square().mean().sqrt()) < ROUNDINGS / 7
    assert float(gaps.max()) < ROUNDINGS


def test_a_wrong_epsilon_is_beyond_the_bound(path: Path) -> None:
    exact, _, scales = score_twice(path, SEQUENCES)
    model = load_model(path, torch.float32)
    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 1e-5  # it is 1e-6
    with torch.inference_mode():
        every = torch.log_softmax(model(input_ids=torch.tensor(SEQUENCES)).logits[:, :-1].double(), -1)
    wrong = every.gather(2, torch.tensor(SEQUENCES)[:, 1:, None]).flatten().numpy()
    assert np.max(np.abs(wrong - flat(exact)) / flat(scales)) > 2 * ROUNDINGS


def test_what_another_sequence_begins_with_is_computed_once_and_scored_the_same(path: Path) -> None:
    first, second = SEQUENCES[:2]
    asked = [first[:20], second, first, first[:40], first]
    assert longest_of(asked) == [4, 1, 4, 4, 4]
    temperatures = [1.0, 1.0, 0.5, 2.0, 0.0]
    together = score_twice(path, asked, temperature=temperatures)
    for at, (tokens, temperature) in enumerate(zip(asked, temperatures, strict=True)):
        alone = score_twice(path, [tokens], temperature=temperature)
        assert together[1][at] == pytest.approx(alone[1][0], abs=1e-12)
        assert np.abs(np.subtract(together[0][at], alone[0][0])).max() < ROUNDINGS * max(alone[2][0])


def test_what_sequences_begin_with_alike_is_computed_once_and_scored_the_same(path: Path) -> None:
    """Two prompts with answers of several lengths, one of which another begins with, and a sequence of its own."""
    first, second, third = SEQUENCES[:3]
    asked = [[*first[:30], *second[:at]] for at in (3, 9, 20)] + [[*second[:40], *third[at : at + 8]] for at in (0, 4)]
    asked += [[*first[:30], *third[:6]], third, first[:30]]
    asked += [[*first[:30], *second[:12], *third[:9]], [*first[:30], *second[:12], *third[9:30]]]
    runs, last = alike([*asked[:7], *asked[8:]])
    spans = [(run.begin, run.end, sorted(run.members), run.after) for run in runs]
    assert spans == [(0, 29, [0, 1, 2, 5, 7, 8], None), (29, 38, [1, 2, 7, 8], 0), (0, 39, [3, 4], None)]
    assert last == [0, 1, 1, 2, 2, 0, None, 1, 1]
    temperatures = [1.0, 0.5, 1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.5, 1.0]
    ends = (3, 17)
    together = sides(None, str(path), asked, "float64", temperature=temperatures, reported=())
    described = sides(None, str(path), asked, "float64", temperature=0.7, ends=ends, reported=())
    for at, (tokens, temperature) in enumerate(zip(asked, temperatures, strict=True)):
        alone = score_twice(path, [tokens], temperature=temperature)
        assert together[0][1][at] == pytest.approx(alone[1][0], abs=1e-5)  # transformers has norms in float32 here too
        assert np.abs(np.subtract(together[0][0][at], alone[0][0])).max() < ROUNDINGS * max(alone[2][0])
        assert 0.2 < max(together[0][2][at]) / max(alone[2][0]) < 5
        lengths = [len(side[at]) for found in described for side in found]
        assert lengths == [len(tokens) - 1] * 5 + [0] + [len(tokens) - 1] * 3
    model = load_model(path, torch.float32)
    for at, tokens in enumerate(asked):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].double() / 0.7
        shares = torch.softmax(logits, dim=-1)
        assert described[1][0][at] == pytest.approx(shares[:, ends].sum(-1).tolist(), abs=1e-5)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        assert described[2][0][at] == pytest.approx(entropy.tolist(), abs=2e-5)


def test_entropies_need_no_end_token(path: Path) -> None:
    asked = ([SEQUENCES[0][:9]], "float64")
    described = [sides(None, str(path), *asked, temperature=0.7, ends=ends, reported=()) for ends in ((), (3,))]
    assert described[0][2] == described[1][2]
    assert described[0][1][0] == [[0.0] * 8]
    assert len(sides(None, str(path), *asked, temperature=0.7)) == 1


def test_passes_are_made_until_what_others_gave_is_near(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    compute = module._Group.hidden

    def counted(group: module._Group, model: Any) -> list[torch.Tensor]:
        passes[-1] += model.model.dtype == torch.float32
        return compute(group, model)

    monkeypatch.setattr(module._Group, "hidden", counted)

    def of(reported: Any, tokens: list[int]) -> list[list[float]]:
        passes.append(0)
        return sides(None, str(path), [tokens], "float64", reported=reported)[0]

    def both(tokens: list[int]) -> tuple[list[float], list[float], list[float]]:
        """Log-probabilities, and the scales by one pass and by all."""
        passes.clear()
        (exact,), _, (one,) = of([[[]]], tokens)
        _, _, (six,) = of(None, tokens)
        assert passes == [1, DRAWS]
        assert all(a <= b for a, b in zip(one, six, strict=True))
        return exact, one, six

    # The first pass may be the one that rounds the most: of which sequences it is, processors say.
    found = ((tokens, *both(tokens)) for tokens in SEQUENCES)
    tokens, exact, one, six = next(item for item in found if max(item[3]) > 1.01 * max(item[2]))
    middle = exact[-1] + NEAR * (max(one) + max(six)) / 2  # it is near some passes, if not the first
    far = exact[-1] + 2 * NEAR * max(six)
    assert max(of([[[middle]]], tokens)[2][0]) > max(one)
    assert of([[[far]]], tokens)[2] == [six]
    assert of([[[far + 1]]], tokens)[2] == [one]  # no rounding explains it
    assert (1 < passes[2] <= DRAWS, passes[3:]) == (True, [DRAWS, 1])


def test_a_further_pass_computes_what_is_not_near_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences go on from one beginning, two of them from a longer one; one of these two is not near."""
    first, second, third = SEQUENCES[:3]
    asked = [[*first[:30], *third[:6]], *([*first[:30], *second[:12], *third[at : 2 * at + 8]] for at in (0, 9))]
    exact, _, once = sides(None, str(path), asked, "float64", reported=[[[]]] * 3)[0]
    sizes: list[list[int]] = []
    compute = module._Group.hidden

    def counted(group: module._Group, model: Any) -> list[torch.Tensor]:
        sizes.append([job.labels.numel() for job in group.jobs])
        return compute(group, model)

    monkeypatch.setattr(module._Group, "hidden", counted)
    reported = [[[exact[at][-1] + (2 * NEAR * max(once[at]) if at == 1 else 0.0)]] for at in range(3)]
    _, _, scales = sides(None, str(path), asked, "float64", reported=reported)[0]
    assert sizes[:2] == [[29, 12, 6, 8, 17]] * 2
    assert sizes[2:] == [[29, 12, 8]] * (len(sizes) - 2) != []
    assert (scales[0], scales[2]) == (once[0], once[2])
    assert all(a <= b for a, b in zip(once[1], scales[1], strict=True))
    assert scales[1] != once[1]


def test_the_distribution_of_each_sampled_token_is_described(path: Path) -> None:
    asked = [SEQUENCES[0][:12], [*SEQUENCES[0][:9], 5, 5], SEQUENCES[1][:9]]
    *_, described = sides(None, str(path), asked, "float64", temperature=[0.7, 0.7, 0.0], sampled=[3, 2, 0])
    assert [len(rows) for rows in described] == [3, 2, 0]
    model = load_model(path, torch.float32)
    for tokens, rows in zip(asked, described, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].double() / 0.7
        shares = torch.softmax(logits, dim=-1)[len(tokens) - 1 - len(rows) :]
        own = tokens[len(tokens) - len(rows) :]
        for at, (share, token, (rank, kept, rest, earlier, repeats)) in enumerate(zip(shares, own, rows, strict=True)):
            assert rank == int((share > share[token]).sum())
            likeliest = share.sort(descending=True).values
            for count, left, wanted in zip(kept, rest, SHARES, strict=True):
                assert likeliest[: count - 1].sum() < wanted <= likeliest[:count].sum() + 1e-6
                assert left == pytest.approx(float(likeliest[count:].sum()), abs=1e-5)
            assert repeats == [back <= at and own[at - back] == token for back in range(1, module.EARLIER + 1)]
            for back, value in enumerate(earlier, 1):
                assert np.isnan(value) if back > at else value == pytest.approx(float(share[own[at - back]]), abs=1e-5)
