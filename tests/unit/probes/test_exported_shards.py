"""Shards of one rank, cut from an export stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifier.export.sharding import Box, ParamPlacement
from verifier.plan.digest import described
from verifier.stages.export.probe_live_weights_megatron import cut

GATE, UP = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
PLACE = ParamPlacement(
    param_name="fc1", global_name="layers.0.fc1", is_buffer=False, dim=0,
    boxes=(Box(source="gate", begin=2, end=4), Box(source="up", begin=2, end=4)),
    source_shapes={"gate": (4, 2), "up": (4, 2)}, group="fc1", replicated_over=(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        ({"gate": GATE, "other": GATE, "up": UP}, True),
        ({"gate": GATE}, False),
        ({"gate": GATE.T.contiguous(), "up": UP}, False),
    ],
)
def test_a_shard_is_cut_once_its_sources_have_passed(stream, found) -> None:
    seen: list[Any] = []
    live: Any = SimpleNamespace(places={(0, "fc1"): PLACE}, coordinate="tp=1")
    probe: Any = SimpleNamespace(emit=seen.append)
    buffer = torch.empty(8)

    def in_one_buffer():
        for name, tensor in stream.items():
            buffer.copy_(tensor.reshape(-1))
            yield name, buffer.view(tensor.shape)

    assert [name for name, _ in cut(probe, live, in_one_buffer(), 3)] == list(stream)
    expected = described(torch.cat([GATE[2:], UP[2:]]))
    assert [(item.name, item.version, item.digest) for item in seen] == (
        [("layers.0.fc1", 3, expected["digest"])] if found else []
    )
