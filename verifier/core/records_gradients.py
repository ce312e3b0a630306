"""Records of whole gradients of an update, in few numbers by tensor."""

from __future__ import annotations

import msgspec

from verifier.core.record import Real, Record


class TensorProduct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inner product of one tensor's weights and gradient, over the elements that a rank's optimizer is given."""

    name: str
    """Megatron's, with the checkpoint's numbers of layer and expert; of some of its rows with ``#`` and their kind."""
    product: Real
    """Sum over elements of weight times gradient; of a norm whose factor is 1 + w, of that factor."""
    squares: Real
    """Sum of the squares of what is added."""


class GradientProducts(Record, frozen=True, kw_only=True, tag="train/products"):
    """Inner products of the weights of one rank and their gradients in one update, before the optimizer clips them."""

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
