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
    record_views(probe, [slice_of("gate.weight", "gate", part, begin=2)], {"gate.weight": whole}, 1)
    view, expected = probe.records
    assert (type(view), type(expected)) == (CheckpointView, ExpectedView)
    assert (expected.dtype, expected.wider_dtype) == (sent, wider)
    assert (expected.wider_digest == view.digest) is bool(wider)
    moved = part.clone()
    moved[0, 0] += 1
    record_views(probe, [slice_of("gate.weight", "gate", moved, begin=2)], {"gate.weight": whole}, 1)
    assert probe.records[3].wider_digest != probe.records[2].digest
