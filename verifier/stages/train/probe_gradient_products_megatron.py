"""Inner products of a rank's weights and gradients in one update, by tensor: the whole gradient in a few numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from verifier.core.record import real
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.train.records import TensorProduct

ELEMENTS = 2**24
"""Elements that are multiplied at once."""
_NORM = re.compile(r"(layer_norm_weight|layernorm\.weight|final_norm\.weight)$")
_FIRST = re.compile(r"linear_fc1\.(weight|bias)\d*$")
_QKV = re.compile(r"linear_qkv\.(weight|bias)$")
READS_STREAM = re.compile(r"(layer_norm_weight|(input|pre_mlp|final)_layernorm\.weight|(final_|\.[eh])norm\.weight)$")
"""Names of norms whose input is the residual stream, or the embedding alone."""
Mask = Callable[[torch.Tensor], torch.Tensor]
"""Indices in a flattened parameter -> True for those in rows of one kind."""


def pieces(size: int, cut: int | None) -> Iterator[tuple[int, int]]:
    """Yield begin and end of pieces of up to `ELEMENTS` elements, none of which goes over the cut."""
    begin = 0
    while begin < size:
        end = min(begin + ELEMENTS, size)
        if cut is not None and begin < cut < end:
            end = cut
        yield begin, end
        begin = end


def _sums(terms: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares, [2] float64."""
    squares = torch.linalg.vector_norm(terms, dtype=torch.float64).square()
    return torch.stack([terms.sum(dtype=torch.float64), squares])


def compares_products(trainer: TrainerModel) -> bool:
    """Tell whether gradients of weights that scale the same numbers are compared (LSS007).

    Not in float32 on a GPU, where Transformer Engine multiplies in TF32.
    """
    return trainer.tier == "cpu" or bool(trainer.provider.bf16)


class Damped:
    """Watch on what the epsilon of norms takes from a change of their inputs' scale, in an update on one rank.

    A norm's output changes by epsilon over the mean square of its input and epsilon, of a relative change of that.

    Args:
        norms: weights of those whose input is the residual stream.
    """

    def __init__(self, norms: Collection[torch.Tensor]) -> None:
        self._norms, self.total = set(norms), torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def watch(
        self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, normed: torch.Tensor, eps: float
    ) -> None:
        """Look at a norm; once its output has a gradient, add the magnitude of each token's change of the loss."""
        if weight not in self._norms or not normed.requires_grad:
            return
        states = x.float() if bias is None else x.float() - x.float().mean(-1, keepdim=True)
        share = eps / (states.square().mean(-1, keepdim=True) + eps)
        scaled = share * (normed.float() if bias is None else normed.float() - bias.float())

        def add(gradient: torch.Tensor) -> None:
            self.total += (scaled * gradient.float()).sum(-1).abs().sum(dtype=torch.float64)

        normed.register_hook(add)


class Products:
    """Inner products of one update on one rank.

    Args:
        provider: of the model, which says how rows of fused linears lie.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._sums: dict[str, torch.Tensor] = {}
        self._reached: dict[str, torch.Tensor] = {}
        """Tensor -> an element of it has a gradient."""

    @property
    def bent(self) -> bool:
        """Logits are bent to a bound."""
        return bool(getattr(self._provider, "final_logit_softcapping", None))

    @torch.no_grad()
    def take(self, name: str, parameter: torch.Tensor, offset: int, gradient: torch.Tensor) -> None:
        """Add a part of a parameter, without a wait for the device.

        Args:
            name: global name of the parameter.
            parameter: as the passes used it.
            offset: index of the part's first element in the flattened parameter.
            gradient: of the part, flat.
        """
        weights = parameter.detach().reshape(-1)[offset : offset + len(gradient)]
        shift = 1.0 if self._provider.layernorm_zero_centered_gamma and _NORM.search(name) else 0.0
        weights = weights.float() + shift if shift else weights
        up, values = self._begin_of_up(name, parameter), self._values(name, parameter)
        reached = gradient.any()
        self._reached[name] = self._reached[name] | reached if name in self._reached else reached
        for begin, end in pieces(len(gradient), None if up is None else up - offset):
            terms = torch.mul(weights[begin:end], gradient[begin:end].float())
            sums = _sums(terms)
            self._add(name, sums)
            if up is not None:
                self._add(f"{name}#up", sums if offset + begin >= up else torch.zeros_like(sums))
            if values:
                at = torch.arange(offset + begin, offset + end, device=terms.device)
                self._add(f"{name}#value", _sums(torch.where(values(at), terms, 0)))

    def _add(self, name: str, sums: torch.Tensor) -> None:
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def _begin_of_up(self, name: str, parameter: torch.Tensor) -> int | None:
        """Return the first of the elements that a gated activation is linear in, the last half; None if it has none.

        Source:
            megatron-core 0.19.2: transformer/mlp.py (``torch.chunk`` of the local output: gate above up within each
            shard).
        """
        provider = self._provider
        bent = getattr(provider, "glu_linear_offset", 0.0) or getattr(provider, "activation_func_clamp_value", None)
        return parameter.numel() // 2 if _FIRST.search(name) and provider.gated_linear_unit and not bent else None

    def _values(self, name: str, parameter: torch.Tensor) -> Mask | None:
        """Return the mask of attention's values, or None if the parameter has none that are told apart.

        Source:
            megatron-core 0.19.2: transformer/attention.py (`get_query_key_value_tensors`: query, key and value rows by
            query group).
        """
        provider = self._provider
        if (
            not _QKV.search(name)
            or getattr(provider, "attention_output_gate", False)
            or provider.multi_latent_attention
        ):
            return None
        groups = provider.num_query_groups or provider.num_attention_heads
        if groups % provider.tensor_model_parallel_size:  # a rank has a part of a group
            return None
        width, head = parameter.numel() // parameter.shape[0], provider.kv_channels
        queries = provider.num_attention_heads // groups
        return lambda at: at // width % ((queries + 2) * head) >= (queries + 1) * head

    @property
    def silent(self) -> tuple[str, ...]:
        """Tensors without a gradient, but for routers that give each token one expert, whose weight may be 1."""
        one = (getattr(self._provider, "moe_router_topk", None) or 0) < 2
        reached = torch.stack(list(self._reached.values())).cpu().tolist() if self._reached else []
        return tuple(
            name
            for name, there in zip(self._reached, reached, strict=True)
            if not there and not (one and name.endswith("router.weight"))
        )

    def found(self) -> tuple[TensorProduct, ...]:
        """Products by tensor."""
        rows = torch.stack(list(self._sums.values())).cpu().tolist() if self._sums else []
        return tuple(
            TensorProduct(name=name, product=real(product), squares=real(squares))
            for name, (product, squares) in zip(self._sums, rows, strict=True)
        )
