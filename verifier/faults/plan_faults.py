"""Bugs of the plan: order, names and dtypes of what will travel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, FireCounter, fault
from verifier.mesh import Mesh

SCORE_BIAS = ".e_score_correction_bias"
Stream = Iterator[tuple[str, Any]]
SCORE_BIAS_ROW: dict[str, Any] = {
    "caught_by": ("PLN002", "TPT003"), "model": "tiny:deepseek-v3", "dtype": "bfloat16"
}  # fmt: skip


def on_stream(**row: Any) -> Callable[[Callable[[Stream, FireCounter], Stream]], Fault]:
    """Register a fault that derives the plan from another stream than the one that will be sent."""

    def register(change: Callable[[Stream, FireCounter], Stream]) -> Fault:
        @functools.wraps(change)
        def plan_of(original: Any, fire: FireCounter, stream: Any, chunk_bytes: int) -> Any:
            return original(change(iter(stream), fire), chunk_bytes)

        target = "verifier.runs.trained_weights_megatron:plan_of(stream, chunk_bytes)"
        return fault(target, stage=Stage.PLAN, **row)(plan_of)

    return register


@on_stream(
    id="plan-order-of-one-rank", reproduces="NovaSky-AI/SkyRL#1581", caught_by=("PLN001",), mesh=Mesh(tp=2, ep=2)
)
def plan_order_of_one_rank(stream: Stream, fire: FireCounter) -> Stream:
    """One trainer rank lists the key and value projections of a layer, which have one shape, the other way round."""
    import torch.distributed as dist

    items = list(stream)
    if dist.get_rank() == 1:
        fire()
        names = [name for name, _ in items]
        first, second = (names.index(f"model.layers.1.self_attn.{kind}_proj.weight") for kind in "kv")
        items[first], items[second] = items[second], items[first]
    yield from items


@on_stream(id="score-bias-not-planned", reproduces="NovaSky-AI/SkyRL#1505", **SCORE_BIAS_ROW)
def score_bias_not_planned(stream: Stream, fire: FireCounter) -> Stream:
    """The metadata lists no router score bias, and the stream brings it."""
    for name, tensor in stream:
        if name.endswith(SCORE_BIAS):
            fire()
        else:
            yield name, tensor


@on_stream(id="score-bias-planned-in-model-dtype", reproduces="NovaSky-AI/SkyRL#1816", **SCORE_BIAS_ROW)
def score_bias_planned_in_model_dtype(stream: Stream, fire: FireCounter) -> Stream:
    """The metadata names the model's dtype for every tensor, the fp32 router score bias included."""
    import torch

    for name, tensor in stream:
        if name.endswith(SCORE_BIAS):
            fire()
            yield name, tensor.to(torch.bfloat16)
        else:
            yield name, tensor
