"""Records of gradients of an update: on some elements, and of whole tensors in few numbers."""

from __future__ import annotations

from typing import Literal

import msgspec

from verifier.core.owed import Owed, every_rank, last_stage, per_update
from verifier.core.record import ArrayRecord, Count, Real, Record


class TensorProduct(msgspec.Struct, frozen=True, kw_only=True):
    """Inner product of one tensor's weights and gradient, over the elements that a rank's optimizer is given."""

    name: str
    """Megatron's, with the checkpoint's numbers of layer and expert; of some of its rows with ``#`` and their kind."""
    product: Real
    """Sum over elements of weight times gradient; of a norm whose factor is 1 + w, of that factor."""
    squares: Real
    """Sum of the squares of what is added."""


class GradientProducts(Record, frozen=True, kw_only=True, tag="train/products"):
    """Inner products of the weights of one rank and their gradients in one update, before the optimizer clips them."""

    owed = (Owed(every_rank, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""
    products: tuple[TensorProduct, ...]
    """Products that the rank stands for among the ranks that hold the same bits: summed over ranks, the model's."""
    damping: Real = 0.0
    """Epsilon of the norms as a share of the mean square of embeddings, of a rank that has some."""
    silent: tuple[str, ...] = ()
    """Tensors of which no element that the rank stands for has a gradient."""
    bent: bool = False
    """Logits are bent to a bound, so that they are not linear in the last norm's output."""


class SummedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of one tensor's gradient on a rank: what its backward passes gave, and what its optimizer was given."""

    name: str
    group: str
    """Label of all ranks that hold the same bits, each of which has a part of the gradient's sum."""
    copies: Count
    """Number of those ranks."""
    begin: Count
    """Index of the first element in the flattened tensor."""
    elements: Count
    owned_begin: Count
    """Index, among the elements, of the first one that the rank's optimizer was given."""
    owned: Count
    """Number of elements that it was given."""
    dtype: Literal["float32", "bfloat16"]
    """Type in which gradients are added up."""
    size: Count = 0
    """Number of all elements of the tensor; 0 where they are not summed."""
    owned_size: Count = 0
    """Number of all elements that the rank's optimizer was given."""


class GradientSums(ArrayRecord, frozen=True, kw_only=True, tag="train/sums"):
    """Gradients of one rank in one update, on some elements of some tensors, and the squares of all.

    Arrays, float32, of all tensors one after another: ``added`` the sum of what each backward pass of the rank gave, in
    order; ``reduced`` what the optimizer was given of them, before it clips; ``used`` the weights that its passes used.
    And float64, [tensors, 4], ``whole``: of all elements of each the sum of what passes gave, that of its magnitudes,
    the number of those passes, and the sum of what the optimizer was given. Records of older runs have none.
    """

    owed = (Owed(every_rank, per_update),)

    coordinate: str
    """Mesh coordinate of the rank."""
    tensors: tuple[SummedTensor, ...]
    squares: Real | None = None
    """Sum of squares, float64, of the gradients that this rank stands for; None where that is not known."""
    miscounted: tuple[str, ...] = ()
    """Tensors that the norm's marks leave out where the rank stands for them, or count where another one does."""
    divisor: Real | None = None
    """Divisor of the sum in what the optimizer was given; None: the number of tokens in the loss."""


class LogitSpreads(ArrayRecord, frozen=True, kw_only=True, tag="loss/spreads"):
    """Size and spread of the logits that the loss of one update read on one rank, by a second formula.

    Arrays [T], of rows as in `LossRows`: ``size`` float32, the greatest magnitude of the row's logits, divided by the
    temperature; records of older runs have none. And where the loss has an entropy ``spread`` float64, the variance of
    a row's log-probabilities under its own distribution, nats squared: what a scale of the row's logits changes its
    entropy by, with the other sign.
    """

    owed = (Owed(last_stage, per_update),)
    is_side = False

    coordinate: str
    """Mesh coordinate of the rank."""
