"""Probe of the routers' own losses in an update: what they add to the gradient of the logits, row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from verifier.core.record import Probe
from verifier.megatron.router_replay_megatron import routers_of
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.loss.records import LogitSpreads, RouterGradients

MOST_ROWS = 32
"""Rows of a pass whose gradients are kept, spread over all of them."""

DTYPES: dict[torch.dtype, Literal["float32", "float64", "bfloat16"]] = {
    torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"
}  # fmt: skip


@dataclass(slots=True)
class _Pass:
    """One forward pass of a router that is differentiated, and what its backward pass gave."""

    layer: int
    number: int
    rows: int
    kept: torch.Tensor
    logits: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor | None
    """Score biases of the pass: an update moves them before its gradients are read."""
    through: torch.Tensor | None = None
    """Gradient by the experts' weights of the rows that are kept."""
    whole: torch.Tensor | None = None
    """Gradient by their logits."""


@contextlib.contextmanager
def router_losses(probe: Probe, trainer: TrainerModel, name: str, version: int) -> Iterator[None]:
    """Record what balancing and z-losses of this rank's routers add to the gradients of the body, an update.

    The gradient by a router's logits has two parts: what comes back through the weights of the experts, and what the
    router's own losses add. The first is differentiated once more, by itself, and taken off. Passes without gradients,
    as the first of two where activations are recomputed, are not looked at. A rank without routers records nothing.
    """
    passes: list[_Pass] = []
    routers = {layer: router for chunk in trainer.chunks for layer, router in routers_of(chunk).items()}
    with contextlib.ExitStack() as stack:
        for layer, router in routers.items():
            _watch(layer, router, passes, stack)
        yield
    if not passes:
        return
    first = next(iter(routers.values()))
    found, sizes = zip(*(_own_gradient(routers[item.layer], item) for item in passes), strict=True)
    at = trainer.mesh.coordinate(dist.get_rank())
    record = RouterGradients(
        name=name, version=version, coordinate=str(at), layers=tuple(item.layer for item in passes),
        numbers=tuple(item.number for item in passes), rows=tuple(item.rows for item in passes),
        kept=tuple(len(item.kept) for item in passes), experts_of_row=first.topk, scores=first.score_function,
        dtype=DTYPES[passes[0].logits.dtype],
    )  # fmt: skip
    arrays = {
        "counts": torch.stack([item.counts for item in passes]),
        "logits": torch.cat([item.logits.double() for item in passes]), "found": torch.cat(found),
        "size": torch.cat(sizes),
    }  # fmt: skip
    probe.emit(record, {key: value.cpu() for key, value in arrays.items()})


def _watch(layer: int, router: Any, passes: list[_Pass], stack: contextlib.ExitStack) -> None:
    gating, count = router.gating, 0

    def seen(states: torch.Tensor) -> torch.Tensor:
        nonlocal count
        logits: torch.Tensor = gating(states)
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return logits
        flat = logits.detach().reshape(-1, logits.shape[-1])
        kept = torch.linspace(0, len(flat) - 1, min(MOST_ROWS, len(flat)), device=flat.device).long()
        item = _Pass(
            layer=layer, number=count, rows=len(flat), kept=kept, logits=flat[kept].clone(),
            counts=_counts(flat, router.topk, router.score_function),
            bias=None if router.expert_bias is None else router.expert_bias.detach().clone(),
        )  # fmt: skip
        count += 1
        passes.append(item)

        def keep(gradient: torch.Tensor) -> None:
            item.whole = gradient.detach().reshape(-1, gradient.shape[-1])[kept].clone()

        logits.register_hook(keep)
        return logits

    def look(_: object, __: object, output: Any) -> None:
        weights = output[0]
        if not (torch.is_grad_enabled() and weights.requires_grad and passes and passes[-1].layer == layer):
            return
        item = passes[-1]

        def keep(gradient: torch.Tensor) -> None:
            item.through = gradient.detach().reshape(-1, gradient.shape[-1])[item.kept].clone()

        weights.register_hook(keep)

    router.gating = seen
    stack.callback(router.__dict__.pop, "gating")
    stack.callback(router.register_forward_hook(look).remove)


def _counts(logits: torch.Tensor, topk: int, scores: str) -> torch.Tensor:
    """[experts] rows that have the expert among those of their greatest scores, without any score bias."""
    chosen = torch.topk(scored(logits, scores), topk, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=logits.shape[1])


def scored(logits: torch.Tensor, scores: str) -> torch.Tensor:
    """Scores of logits that add up to one in each row, float32, as a balancing loss reads them."""
    if scores == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    raw = torch.sigmoid(logits.float()) if scores == "sigmoid" else torch.nn.functional.softplus(logits.float()).sqrt()
    return raw / raw.sum(-1, keepdim=True)


def _own_gradient(router: Any, item: _Pass) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, experts] what the router's own losses add to the gradient of the rows that are kept, and its [rows] size.

    Source:
        megatron-core 0.19.2, core/transformer/moe/router.py, `TopKRouter.routing`: the arguments of the choice.
    """
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    config = router.config
    zero = torch.zeros_like(item.logits)
    whole = (zero if item.whole is None else item.whole).double()
    if item.through is None:
        return whole, whole.abs().amax(-1)
    with torch.enable_grad():
        logits = item.logits.clone().requires_grad_()
        weights, _ = topk_routing_with_score_function(
            logits, router.topk, use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups, group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor, score_function=router.score_function,
            expert_bias=item.bias, fused=False,
        )  # fmt: skip
        (part,) = torch.autograd.grad(weights, logits, item.through.to(weights.dtype))
    size = torch.stack([whole.abs().amax(-1), part.double().abs().amax(-1), item.through.double().abs().amax(-1)])
    return whole - part.double(), size.amax(0)


ELEMENTS = 2**22
"""Logits that are read at once."""


@contextlib.contextmanager
def logit_spreads(
    probe: Probe, trainer: TrainerModel, name: str, version: int, *, temperature: float, spread: bool
) -> Iterator[None]:  # fmt: skip
    """Record how large the logits of every row are that this rank's loss reads within the body, an update.

    Ranks of the last pipeline stage compute it, by the logits that their model gives, tensor-parallel ranks together;
    of these the first one records it.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        name: of the update, as its records have it.
        version: of the weights.
        temperature: divisor of the logits.
        spread: the variance of log-probabilities too, which takes an exponential of each logit.
    """
    found: dict[str, list[torch.Tensor]] = {"size": [], **({"spread": []} if spread else {})}

    def look(_: object, __: object, output: Any) -> None:
        logits_TV = output.detach()[0]
        found["size"].append(_size(logits_TV, trainer.mesh.tp) / temperature)
        if spread:
            found["spread"].append(_spread(logits_TV, temperature, trainer.mesh.tp))

    with contextlib.ExitStack() as stack:
        for chunk in trainer.chunks:
            if _is_last(chunk):
                stack.callback(chunk.register_forward_hook(look).remove)
        yield
    at = trainer.mesh.coordinate(dist.get_rank())
    if found["size"] and at.tp == 0:
        record = LogitSpreads(name=name, version=version, coordinate=str(at))
        probe.emit(record, {each: torch.cat(parts).cpu() for each, parts in found.items()})


def _is_last(chunk: Any) -> bool:
    from megatron.core.utils import get_attr_wrapped_model

    return bool(get_attr_wrapped_model(chunk, "post_process"))


def _size(logits_TV: torch.Tensor, tp: int) -> torch.Tensor:
    """[T] greatest magnitude of the logits of a row, float32."""
    size_T = torch.maximum(logits_TV.amax(-1), -logits_TV.amin(-1)).float()
    _reduce(size_T, dist.ReduceOp.MAX, tp)
    return size_T


def _spread(logits_TV: torch.Tensor, temperature: float, tp: int) -> torch.Tensor:
    """[T] variance of the log-probabilities of a row under its own distribution, float64, nats squared."""
    parts = [
        _variance(rows.double() / temperature, tp) for rows in logits_TV.split(max(1, ELEMENTS // logits_TV.shape[1]))
    ]  # fmt: skip
    return torch.cat(parts)


def _variance(scaled_CV: torch.Tensor, tp: int) -> torch.Tensor:
    top_C = scaled_CV.amax(-1)
    _reduce(top_C, dist.ReduceOp.MAX, tp)
    shifted_CV = scaled_CV - top_C[:, None]
    share_CV = shifted_CV.exp()
    sums_2C = torch.stack([share_CV.sum(-1), (share_CV * shifted_CV).sum(-1)])
    _reduce(sums_2C, dist.ReduceOp.SUM, tp)
    squares_C = (share_CV * (shifted_CV - (sums_2C[1] / sums_2C[0])[:, None]).square()).sum(-1)
    _reduce(squares_C, dist.ReduceOp.SUM, tp)
    return squares_C / sums_2C[0]


def _reduce(values: torch.Tensor, how: Any, tp: int) -> None:
    if tp > 1:
        from megatron.core import parallel_state

        dist.all_reduce(values, op=how, group=parallel_state.get_tensor_model_parallel_group())
