"""Bugs of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, kind
from verifier.mesh import Mesh

SCORE_BIAS = ".e_score_correction_bias"
BIAS_PLANNED: dict[str, Any] = {"caught_by": ("PLN002", "TPT002"), "model": "tiny:deepseek-v3", "dtype": "bfloat16"}
Stream = Iterator[tuple[str, Any]]


@kind("verifier.runs.trained_weights_megatron:plan_of(stream, chunk_bytes)", stage=Stage.PLAN)
def on_plan(planned: Callable[[Call], Stream], call: Call) -> Any:
    """Plan another stream than the one that will be sent: the function yields it."""
    return call.original(stream=planned(call))


@on_plan("NovaSky-AI/SkyRL#1581", caught_by=("PLN001",), mesh=Mesh(tp=2, ep=2))
def plan_order_of_one_rank(call: Call) -> Stream:
    """One trainer rank lists the key and value projections of a layer, which have one shape, the other way round."""
    import torch.distributed as dist

    items = list(call.stream)
    if dist.get_rank() == 1:
        call.fire()
        names = [name for name, _ in items]
        first, second = (names.index(f"model.layers.1.self_attn.{kind}_proj.weight") for kind in "kv")
        items[first], items[second] = items[second], items[first]
    yield from items


@on_plan("NovaSky-AI/SkyRL#1505", **BIAS_PLANNED)
def score_bias_not_planned(call: Call) -> Stream:
    """The metadata lists no router score bias, and the stream brings it."""
    for name, tensor in call.stream:
        if name.endswith(SCORE_BIAS):
            call.fire()
        else:
            yield name, tensor
