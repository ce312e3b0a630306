"""Probe of the routers' score biases in an update: before, after, and the tokens that each expert was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from verifier.core.record import Probe
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.train.records import RouterBalance

_LEFT: MutableMapping[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()
"""Router -> its score bias as the last recorded update left it."""


@contextlib.contextmanager
def router_balance(
    probe: Probe, trainer: TrainerModel, name: str, version: int, *, rate: float
) -> Iterator[None]:  # fmt: skip
    """Record the score biases of this rank's routers before and after the body, an update, with the tokens it counted.

    A token is counted where a router gives it to an expert, by the router's output, within the forward pass of a model
    chunk: once for each micro-batch. What is recomputed runs later, in the backward pass, and is not counted. Rows of
    padding count like others, as megatron-core counts them where it is given no mask of them. A rank whose routers have
    no score bias records nothing.

    Args:
        probe: this rank's recorder.
        trainer: the model.
        name: of the update, as its records have it.
        version: of the weights.
        rate: change of a bias in a step that the config asks for.
    """
    routers = {layer: router for chunk in trainer.chunks for layer, router in _biased(chunk).items()}
    if not routers:
        yield
        return
    layers = sorted(routers)
    counts = {layer: torch.zeros_like(routers[layer].expert_bias, dtype=torch.int64) for layer in layers}
    before = _biases(routers)
    with contextlib.ExitStack() as stack:
        for chunk in trainer.chunks:
            _count(chunk, counts, stack)
        yield
    arrays = {
        "before": before, "after": _biases(routers), "tokens": torch.stack([counts[layer] for layer in layers])
    }  # fmt: skip
    if all(router in _LEFT for router in routers.values()):
        arrays["left"] = torch.stack([_LEFT[routers[layer]] for layer in layers])
    _LEFT.update(zip((routers[layer] for layer in layers), arrays["after"], strict=True))
    at = trainer.mesh.coordinate(dist.get_rank())
    record = RouterBalance(name=name, version=version, coordinate=str(at), layers=tuple(layers), rate=rate)
    probe.emit(record, arrays)


def _count(chunk: torch.nn.Module, counts: dict[int, torch.Tensor], stack: contextlib.ExitStack) -> None:
    """Count what a chunk's routers choose while its own forward pass runs, until the stack is closed."""
    inside = False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    stack.callback(chunk.register_forward_pre_hook(enter).remove)
    stack.callback(chunk.register_forward_hook(leave).remove)
    for layer, router in _biased(chunk).items():

        def look(_: object, __: object, output: Any, layer: int = layer) -> None:
            if inside:
                counts[layer] += output[1].sum(0)  # [rows, experts], True where a row goes to an expert

        stack.callback(router.register_forward_hook(look).remove)


def _biases(routers: dict[int, Any]) -> torch.Tensor:
    return torch.stack([routers[layer].expert_bias.detach().float() for layer in sorted(routers)]).clone()


def _biased(chunk: torch.nn.Module) -> dict[int, Any]:
    """Routers of a chunk that have a score bias, by global layer from 0."""
    from megatron.core.transformer.moe.router import TopKRouter

    return {
        module.layer_number - 1: module
        for module in chunk.modules()
        if isinstance(module, TopKRouter) and module.expert_bias is not None
    }
