"""Magnitudes of the gradients of single sequences, added up: what rounding may change a gradient by."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call, grad, vmap

from verifier.oracle.batches_hf import Batch, logits_of
from verifier.oracle.routes_hf import choosing, mixtures_of

MAX_ELEMENTS = 2**24
"""Most elements of the gradients, and of gathered weights of experts, of sequences computed together, unless it
is one; 64 MiB in float32."""


def magnitudes(model: Any, batch: Batch, share_BT: torch.Tensor, temperature: float) -> list[torch.Tensor | None]:
    """Sum over sequences of the magnitude of the gradient of each sequence's sum of share * log Z, per parameter.

    Every sequence has a gradient of its own, by `torch.func`: that of its own function, which transformers computes of
    it alone. Where the experts of a mixture are looped over (`load_model`), which experts those are depends on the
    tokens; so here each token's experts are gathered instead, by transformers' own ``batched_mm``.

    Args:
        model: from `trainable`.
        batch: the sequences.
        share_BT: [B, T - 1] float64, not negative, for log Z of the logits after each token but the last.
        temperature: divisor of the logits.

    Returns:
        Per parameter its sum; None if no sequence has a gradient of it.
    """
    parameters = dict(model.named_parameters())
    rows = share_BT.any(1).nonzero()[:, 0].tolist()  # of others, all gradients are zero
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    size = _rows_at_once(model, batch)
    for begin in range(0, len(rows), size):
        places = rows[begin : begin + size]
        part = Batch(
            places=tuple(batch.places[at] for at in places), tokens=batch.tokens[places],
            experts={layer: chosen[places] for layer, chosen in batch.experts.items()},
        )  # fmt: skip
        one_by_one = _together if len(places) > 1 else _alone
        add(sums, one_by_one(model, parameters, part, share_BT[places], temperature))
    return sums


def _rows_at_once(model: Any, batch: Batch) -> int:
    """Sequences that are computed together."""
    per_token = 0
    for layer, block in mixtures_of(model).items():
        matrices = [tensor for tensor in block.experts.parameters() if tensor.ndim == 3]
        given = batch.experts.get(layer)
        num_chosen = model.config.get_text_config().num_experts_per_tok if given is None else given.shape[-1]
        per_token += num_chosen * sum(tensor[0].numel() for tensor in matrices)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return max(1, MAX_ELEMENTS // (weights + per_token * batch.tokens.shape[1]))


def _alone(
    model: Any, parameters: Mapping[str, torch.Tensor], batch: Batch, share_BT: torch.Tensor, temperature: float
) -> list[torch.Tensor | None]:
    """Magnitudes of the gradients of one sequence, by the loop over experts."""
    log_sum = torch.logsumexp(logits_of(model, batch)[:, :-1].double() / temperature, dim=-1)
    found = torch.autograd.grad((share_BT * log_sum).sum(), list(parameters.values()), allow_unused=True)
    return [None if gradient is None else gradient.abs() for gradient in found]


def _together(
    model: Any, parameters: Mapping[str, torch.Tensor], batch: Batch, share_BT: torch.Tensor, temperature: float
) -> list[torch.Tensor | None]:
    """Sum of the magnitudes of the gradients of several sequences, by `vmap`."""

    def of_one(
        weights: Mapping[str, torch.Tensor], tokens_T: torch.Tensor, share_T: torch.Tensor,
        experts: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        with choosing(model, experts, batch.margin):
            told = {"input_ids": tokens_T[None], "use_cache": False}
            logits = functional_call(model, weights, (), told).logits[0, :-1].double()
        return (share_T * torch.logsumexp(logits / temperature, dim=-1)).sum()

    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    with _gathering(model):
        found = vmap(grad(of_one), (None, 0, 0, 0))(weights, batch.tokens, share_BT, dict(batch.experts))
    return [found[name].abs_().sum(0) for name in parameters]


@contextlib.contextmanager
def _gathering(model: Any) -> Iterator[None]:
    """Within, the weights of each token's experts are gathered; `vmap` does not warn of what it loops over."""
    model.set_experts_implementation("batched_mm")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            yield
    finally:
        model.set_experts_implementation("eager")


def add(sums: list[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add to sums what there is of gradients."""
    for index, (before, gradient) in enumerate(zip(sums, gradients, strict=True)):
        if gradient is not None:
            sums[index] = gradient if before is None else before + gradient
