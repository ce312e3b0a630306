"""The distribution that a request asks for, against transformers' own processors and by hand."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verifier.engine.api import Sampling, Shape
from verifier.engine.shaping import shaped

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
PROMPT, ANSWER = [1, 2, 40], [7, 7, 2]


def asked(shape: Shape, **fields: object) -> torch.Tensor:
    """The distribution after `PROMPT` and `ANSWER`."""
    return shaped(LOGITS, PROMPT, ANSWER, Sampling(seed=0, max_tokens=1, shape=shape, **fields))


@pytest.mark.parametrize(
    ("shape", "theirs"),
    [
        (Shape(), None),
        (Shape(repetition=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
        (Shape(min_p=0.2), MinPLogitsWarper(0.2)),
        (Shape(top_k=7), TopKLogitsWarper(7)),
        (Shape(top_p=0.6), TopPLogitsWarper(0.6)),
    ],
)
def test_as_transformers_has_it(shape: Shape, theirs: LogitsProcessor | None) -> None:
    whole = torch.tensor([[*PROMPT, *ANSWER]])
    logits = LOGITS[None].clone() if theirs is None else theirs(whole, LOGITS[None].clone())
    torch.testing.assert_close(asked(shape), logits[0].log_softmax(-1))


def test_by_hand() -> None:
    """What transformers has no word for."""
    logits = LOGITS.clone()
    logits[5] += 3
    logits[7] -= 2 * 0.5 + 0.25
    logits[2] -= 1 * 0.5 + 0.25
    logits[9] = -torch.inf
    shape = Shape(presence=0.25, frequency=0.5, bias=((5, 3.0),), least=4)
    torch.testing.assert_close(asked(shape, stop=(9,), temperature=2.0), (logits / 2).log_softmax(-1))
    only = asked(Shape(allowed=(3, 4)))
    assert only.isfinite().nonzero()[:, 0].tolist() == [3, 4]
    assert float(only.exp().sum()) == pytest.approx(1)


def test_slack_moves_the_edges() -> None:
    """Tokens at the very edge are kept with slack, and dropped with less than none; others are not moved by either."""
    least = float(LOGITS.topk(7).values[-1])
    logits = LOGITS.clone()
    logits[logits.argsort(descending=True)[7]] = least - 1e-6
    for slack, kept in ((1e-4, 8), (0.0, 7), (-1e-4, 6)):
        found = shaped(logits, PROMPT, ANSWER, Sampling(seed=0, max_tokens=1, shape=Shape(top_k=7)), slack)
        assert int(found.isfinite().sum()) == kept

    for shape in (Shape(top_k=7), Shape(top_p=0.6), Shape(min_p=0.2)):
        row = [
            shaped(LOGITS, PROMPT, ANSWER, Sampling(seed=0, max_tokens=1, shape=shape), by) for by in (-1e-9, 0, 1e-9)
        ]
        assert torch.equal(row[0], row[1])
        assert torch.equal(row[1], row[2])


@pytest.mark.parametrize("shape", [Shape(top_k=7), Shape(min_p=0.2), Shape(top_p=0.6)])
def test_a_spared_token_is_kept_beside_what_truncation_keeps(shape: Shape) -> None:
    asked = Sampling(seed=0, max_tokens=1, shape=shape)
    kept = shaped(LOGITS, PROMPT, ANSWER, asked).isfinite()
    least = int(LOGITS.argmin())
    found = shaped(LOGITS, PROMPT, ANSWER, asked, spared=least)
    assert found.isfinite().nonzero()[:, 0].tolist() == sorted([*kept.nonzero()[:, 0].tolist(), least])
    assert float(found.exp().sum()) == pytest.approx(1)


def test_greedy_is_undivided() -> None:
    torch.testing.assert_close(asked(Shape(), temperature=0.0), LOGITS.log_softmax(-1))


def test_before_the_least_length_there_is_no_end_of_the_model_either() -> None:
    banned = asked(Shape(least=4), stop=(9,), ends=(5, 6))
    assert banned.isinf().nonzero()[:, 0].tolist() == [5, 6, 9]
    assert asked(Shape(least=3), stop=(9,), ends=(5, 6)).isfinite().all()
