"""Bugs of the plan: order, names and dtypes of what will travel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

SCORE_BIAS = ".e_score_correction_bias"
Stream = Iterator[tuple[str, Any]]


def _planned_from(fired: Fired, change: Callable[[Stream, Fired], Stream]) -> contextlib.AbstractContextManager[None]:
    """The plan is derived from another stream than the one that will be sent."""

    def make(original: Any) -> Any:
        def plan_of(stream: Any, chunk_bytes: int) -> Any:
            return original(change(iter(stream), fired), chunk_bytes)

        return plan_of

    return replaced("verifier.runs.full_weights_megatron:plan_of", "stream, chunk_bytes", make)


def _other_order_on_rank_1(stream: Stream, fired: Fired) -> Stream:
    import torch.distributed as dist

    items = list(stream)
    if dist.get_rank() == 1:
        fired()
        names = [name for name, _ in items]
        first, second = (names.index(f"model.layers.1.self_attn.{kind}_proj.weight") for kind in "kv")
        items[first], items[second] = items[second], items[first]
    yield from items


def _without_score_bias(stream: Stream, fired: Fired) -> Stream:
    for name, tensor in stream:
        if name.endswith(SCORE_BIAS):
            fired()
        else:
            yield name, tensor


def _score_bias_in_model_dtype(stream: Stream, fired: Fired) -> Stream:
    import torch

    for name, tensor in stream:
        if name.endswith(SCORE_BIAS):
            fired()
            yield name, tensor.to(torch.bfloat16)
        else:
            yield name, tensor


FAULTS = (
    Fault(
        id="plan-order-of-one-rank",
        stage=Stage.PLAN,
        reproduces="NovaSky-AI/SkyRL#1581",
        summary="one trainer rank lists the key and value projections of a layer, which have one shape, the other way",
        caught_by=("PLN001",),
        inject=lambda fired: _planned_from(fired, _other_order_on_rank_1),
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="score-bias-not-planned",
        stage=Stage.PLAN,
        reproduces="NovaSky-AI/SkyRL#1505",
        summary="the metadata lists no router score bias, and the stream brings it",
        caught_by=("PLN002", "TPT003"),
        inject=lambda fired: _planned_from(fired, _without_score_bias),
        model="tiny:deepseek-v3",
        dtype="bfloat16",
    ),
    Fault(
        id="score-bias-planned-in-model-dtype",
        stage=Stage.PLAN,
        reproduces="NovaSky-AI/SkyRL#1816",
        summary="the metadata names the model's dtype for every tensor, the fp32 router score bias included",
        caught_by=("PLN002", "TPT003"),
        inject=lambda fired: _planned_from(fired, _score_bias_in_model_dtype),
        model="tiny:deepseek-v3",
        dtype="bfloat16",
    ),
)
