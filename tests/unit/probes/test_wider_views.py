"""What a probe records of a tensor that an engine holds in a wider dtype than it was sent in."""

import pytest
import torch

from verifier.engine.stored_tensors import slice_of
from verifier.stages.engine.probe_engine_state import record_views
from verifier.stages.engine.records import CheckpointView, ExpectedView


class Kept:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.records: list = []

    def emit(self, record, array=None) -> None:
        self.records.append(record)


@pytest.mark.parametrize(
    ("sent", "held", "wider"),
    [
        ("bfloat16", "float32", "float32"),
        ("float16", "float64", "float64"),
        ("bfloat16", "bfloat16", ""),
        ("bfloat16", "float16", ""),
        ("float32", "bfloat16", ""),
    ],
)
def test_the_digest_in_the_wider_dtype_is_that_of_the_same_values(sent, held, wider):
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(getattr(torch, sent))
    probe, part = Kept(), whole[2:6].to(getattr(torch, held))
    record_views(probe, [slice_of("gate.weight", "gate", part, begin=2)], {"gate.weight": whole}, 1, {})
    view, expected = probe.records
    assert (type(view), type(expected)) == (CheckpointView, ExpectedView)
    assert (expected.dtype, expected.wider_dtype) == (sent, wider)
    assert (expected.wider_digest == view.digest) is bool(wider)
    moved = part.clone()
    moved[0, 0] += 1
    record_views(probe, [slice_of("gate.weight", "gate", moved, begin=2)], {"gate.weight": whole}, 1, {})
    assert probe.records[3].wider_digest != probe.records[2].digest


FURTHER = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("model.layers.1.eh_proj.weight", FURTHER, True),
        ("model.layers.2.eh_proj.weight", FURTHER, False),
        ("model.layers.3.eh_proj.weight", FURTHER, True),
        ("model.layers.2.eh_proj.weight", {"num_hidden_layers": 2}, True),
        ("model.layers.2.eh_proj.weight", {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}, True),
        ("mtp.fc.weight", {"num_hidden_layers": 2}, False),
    ],
)
def test_an_engine_is_to_hold_all_but_layers_that_predict_further_tokens(name, config, expected):
    probe, whole = Kept(), torch.ones(4, 4)
    record_views(probe, [], {name: whole}, 1, config)
    assert bool(probe.records) is expected
    record_views(probe, [slice_of(name, name, whole)], {name: whole}, 2, config)
    assert [type(item) for item in probe.records[-2:]] == [CheckpointView, ExpectedView]
