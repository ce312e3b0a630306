"""Log-probability and entropy: exact against float64, untouched inputs, and every row depends on itself alone.

What this does not exercise: a vocabulary split over ranks (tests/dist/test_tokens_logprob.py).
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from verifier.errors import ContractError
from verifier.megatron.pack import IGNORE_LABEL
from verifier.megatron.vocab_logprob import vocab_parallel_logprob

ULP = 2.0**-24
"""Unit roundoff of float32."""


@st.composite
def problems(draw, *, max_rows: int = 9, max_vocab: int = 33) -> dict:
    num_rows, vocab = draw(st.integers(1, max_rows)), draw(st.integers(1, max_vocab))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = torch.randn(num_rows, vocab, dtype=torch.float64, generator=generator) * draw(st.sampled_from([1, 8, 40]))
    labels = torch.randint(0, vocab, (num_rows,), generator=generator)
    labels[torch.rand(num_rows, generator=generator) < draw(st.sampled_from([0, 0.3]))] = IGNORE_LABEL
    return {
        "logits": logits,
        "labels": labels,
        "temperature": draw(st.sampled_from([1.0, 0.6, 2.5])),
        "chunk_tokens": draw(st.integers(1, max_rows + 1)),
    }


def reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook, in float64, with every intermediate in full."""
    logp = torch.log_softmax(logits.double() / temperature, -1)
    kept = labels != IGNORE_LABEL
    taken = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(kept, taken, zero), torch.where(kept, -(logp.exp() * logp).sum(-1), zero)


def graded(fn, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probability, entropy, gradient of a sum that weighs every row and both outputs differently)."""
    leaf = logits.clone().requires_grad_()
    logprob, entropy = fn(leaf)
    weights = torch.arange(1, len(logits) + 1, dtype=logprob.dtype)
    (logprob * weights + entropy * weights.flip(0) / 3).sum().backward()
    return logprob.detach(), entropy.detach(), leaf.grad


@given(problem=problems())
def test_float64_agrees_with_the_textbook_in_value_and_gradient(problem: dict) -> None:
    settings = {"temperature": problem["temperature"], "chunk_tokens": problem["chunk_tokens"]}
    labels = problem["labels"]
    actual = graded(lambda x: vocab_parallel_logprob(x, labels, **settings), problem["logits"])
    expected = graded(lambda x: reference(x, labels, problem["temperature"]), problem["logits"])
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@given(problem=problems())
def test_float32_is_within_rounding_of_float64(problem: dict) -> None:
    """Bound: V + 8 roundings of numbers no greater than the greatest scaled logit's distance from the top."""
    labels, temperature = problem["labels"], problem["temperature"]
    logits = problem["logits"].float()
    settings = {"temperature": temperature, "chunk_tokens": problem["chunk_tokens"]}
    actual = graded(lambda x: vocab_parallel_logprob(x, labels, **settings), logits)
    expected = graded(lambda x: reference(x, labels, temperature), logits.double())
    spread = float((logits.amax() - logits.amin()) / temperature) + float(logits.abs().amax() / temperature) + 1
    bound = ULP * (logits.shape[1] + 8) * spread
    for got, want in zip(actual[:2], expected[:2], strict=True):
        assert (got - want).abs().max() <= bound
    scale = len(logits) * (spread + 1) / temperature
    assert (actual[2] - expected[2]).abs().max() <= bound * scale * 2


@given(problem=problems())
def test_bfloat16_rounds_the_gradient_once(problem: dict) -> None:
    logits = problem["logits"].bfloat16()
    labels, temperature = problem["labels"], problem["temperature"]
    got = graded(lambda x: vocab_parallel_logprob(x, labels, temperature=temperature), logits)
    want = graded(lambda x: vocab_parallel_logprob(x, labels, temperature=temperature), logits.float())
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2].bfloat16())


@given(problem=problems())
def test_inputs_are_not_modified(problem: dict) -> None:
    leaf = problem["logits"].float().requires_grad_()
    before, labels_before = leaf.detach().clone(), problem["labels"].clone()
    logprob, entropy = vocab_parallel_logprob(leaf, problem["labels"], temperature=problem["temperature"])
    assert torch.equal(leaf.detach(), before)
    grads = torch.ones_like(logprob), torch.ones_like(entropy)
    torch.autograd.backward([logprob, entropy], list(grads))
    assert torch.equal(leaf.detach(), before)
    assert torch.equal(problem["labels"], labels_before)
    assert (grads[0] == 1).all()
    assert (grads[1] == 1).all()


@given(problem=problems())
def test_forward_only_and_recompute_agree_bitwise_with_training(problem: dict) -> None:
    labels, logits = problem["labels"], problem["logits"].float()

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_logprob(
            x, labels, temperature=problem["temperature"], chunk_tokens=problem["chunk_tokens"]
        )

    training = graded(run, logits)
    recomputed = graded(lambda x: checkpoint(run, x, use_reentrant=False), logits)
    with torch.no_grad():
        forward_only = run(logits)
    for got, want in zip(recomputed, training, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(forward_only, training, strict=False):
        assert torch.equal(got, want)


@given(problem=problems(), data=st.data())
def test_a_row_depends_on_itself_alone_bitwise(problem: dict, data: st.DataObject) -> None:
    labels, logits = problem["labels"], problem["logits"].float()
    mine = data.draw(st.integers(0, len(logits) - 1))
    others = torch.arange(len(logits)) != mine

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple:
        return graded(lambda z: vocab_parallel_logprob(z, y, chunk_tokens=problem["chunk_tokens"]), x)

    before = run(logits, labels)
    disturbed, other_labels = logits.clone(), labels.clone()
    disturbed[others] = data.draw(st.sampled_from([0.0, 77.0, float("nan"), float("inf")]))
    other_labels[others] = data.draw(st.sampled_from([0, IGNORE_LABEL]))
    after = run(disturbed, other_labels)
    for got, want in zip(after, before, strict=True):
        assert torch.equal(got[mine], want[mine])


@given(problem=problems(), poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_poison_in_ignored_rows_changes_nothing(problem: dict, poison: float) -> None:
    labels, logits = problem["labels"], problem["logits"].float()
    ignored = labels == IGNORE_LABEL
    poisoned = logits.masked_fill(ignored[:, None], poison)
    before = graded(lambda x: vocab_parallel_logprob(x, labels), logits)
    after = graded(lambda x: vocab_parallel_logprob(x, labels), poisoned)
    for got, want in zip(after, before, strict=True):
        assert torch.equal(got, want)
        assert (got[ignored] == 0).all()


def test_a_column_of_minus_infinity_has_no_share() -> None:
    logits = torch.tensor([[1.0, -float("inf"), 2.0]])
    logprob, entropy, grad = graded(lambda x: vocab_parallel_logprob(x, torch.tensor([2])), logits)
    want = graded(lambda x: vocab_parallel_logprob(x, torch.tensor([1])), logits[:, [0, 2]])
    assert torch.equal(logprob, want[0])
    assert torch.equal(entropy, want[1])
    assert torch.equal(grad[:, [0, 2]], want[2])
    assert grad[0, 1] == 0


def test_a_column_of_minus_infinity_has_no_gradient_however_the_entropy_weighs() -> None:
    logits = torch.tensor([[1.0, -float("inf"), 2.0]], requires_grad=True)
    logprob, entropy = vocab_parallel_logprob(logits, torch.tensor([2]))
    (logprob + 1e6 * entropy).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


def test_without_entropy_there_is_none_and_the_gradient_is_that_of_the_logprob() -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.tensor([0, IGNORE_LABEL, 6])
    logprob, entropy = vocab_parallel_logprob(logits, labels, entropy=False)
    assert entropy is None
    logprob.sum().backward()
    want = logits.detach().clone().requires_grad_()
    reference(want, labels, 1.0)[0].sum().backward()
    torch.testing.assert_close(logits.grad, want.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_outside_of_the_vocabulary_is_an_error_naming_its_row(label: int) -> None:
    with pytest.raises(ContractError, match=rf"label {label} of row 1 is held by 0 ranks"):
        vocab_parallel_logprob(torch.zeros(2, 7), torch.tensor([0, label]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_positive_is_an_error(temperature: float) -> None:
    with pytest.raises(ContractError, match="is not a positive number"):
        vocab_parallel_logprob(torch.zeros(2, 7), torch.tensor([0, 1]), temperature=temperature)


def test_shapes_that_disagree_are_an_error() -> None:
    with pytest.raises(ContractError, match=r"logits have shape \[2, 7\] and labels \[3\]"):
        vocab_parallel_logprob(torch.zeros(2, 7), torch.tensor([0, 1, 2]))
