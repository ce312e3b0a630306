"""Tensors of an engine of several stages, by ENG001: each rank holds those of its own stage.

What this does not exercise: what vLLM's ranks say that they hold (tests/dist/test_roundtrip.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.engine.api import EngineSlice
from verifier.engine.stored_tensors import slice_of
from verifier.stages.engine.checks import engine_tensor_differs
from verifier.stages.engine.probe_engine_state import record_views
from verifier.stages.engine.records import QuantizedNames

SENT = {name: torch.randn(4, 2) for name in ("embed", "layer.0", "layer.1")} | {"scalar": torch.tensor(2.0)}


class Rank:
    """Keeps what is recorded of one engine rank."""

    def __init__(self, rank: int, seen: list[Record]) -> None:
        self._rank, self._seen = rank, seen

    def emit(self, record: Record, array: object = None) -> None:
        self._seen.append(replace(record, role="engine", rank=self._rank))


def held(*names: str, of: dict[str, torch.Tensor] = SENT) -> list[EngineSlice]:
    own = [slice_of(name, f"model.{name}", of[name]) for name in names]
    return own + [slice_of(name, "", torch.empty(0)) for name in of if name not in names]


def wrong(*stages: Sequence[EngineSlice], rounded: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    seen: list[Record] = [QuantizedNames(name="quantized", version=1, role="engine", names=rounded)] if rounded else []
    for rank, slices in enumerate(stages):
        record_views(Rank(rank, seen), slices, SENT, 1)
    trace = Trace(Manifest(engine_ranks=len(stages)), seen, {}.__getitem__)
    return [(item.what, item.sentence) for item in engine_tensor_differs(trace) if not item.same]


def test_layers_of_other_stages_and_a_tied_head_on_two_hold():
    assert wrong(held("embed", "layer.0", "scalar"), held("layer.1", "embed")) == []


@pytest.mark.parametrize(("name", "elements"), [("layer.1", 8), ("scalar", 1)])
def test_a_tensor_that_no_stage_holds_is_named(name, elements):
    others = [item for item in SENT if item != name]
    sentence = f"the engine's ranks together hold 0 of the {elements} elements of `{name}`"
    assert wrong(held(*others[:2]), held(others[2])) == [(name, sentence)]
    assert wrong(held(*others[:2]), held(others[2]), rounded=(name,)) == []


def test_the_layer_of_another_stage_is_told_from_the_own_one():
    exchanged = held("layer.1", of={**SENT, "layer.1": SENT["layer.0"]})
    assert [name for name, _ in wrong(held("embed", "layer.0", "scalar"), exchanged)] == ["layer.1"]


def test_a_tensor_of_which_a_rank_says_nothing_is_missing():
    silent = [item for item in held("layer.1") if item.name != "embed"]
    assert [name for name, _ in wrong(held("embed", "layer.0", "scalar"), silent)] == ["embed"]
