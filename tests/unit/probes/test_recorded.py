"""The export stream as it passes: what its reader still holds must stay as it was handed out."""

import numpy as np
import torch

from tests.unit.probes.test_saved import Seen
from verifier.stages.export.probe_tensors import recorded
from verifier.stages.export.records import ExportedTensor, ExportStream

SHAPE = (4, 3)


def overwritten(stream) -> list[str]:
    seen = Seen()
    held = list(recorded(seen, stream, 2))
    assert [name for name, _ in held] == ["a", "b", "c"]
    assert [item.name for item in seen if isinstance(item, ExportedTensor)] == ["a", "b", "c"]
    (found,) = [item for item in seen if isinstance(item, ExportStream)]
    assert (found.version, found.num_tensors) == (2, 3)
    return [each.name for each in found.reread if each.still_held != each.handed_over]


def one_buffer():
    buffer = torch.zeros(SHAPE)
    for value, name in enumerate("abc"):
        yield name, buffer.fill_(value).view(SHAPE)


def test_tensors_of_their_own_memory():
    assert overwritten(((name, torch.full(SHAPE, float(value))) for value, name in enumerate("abc"))) == []


def test_views_of_one_tensor_beside_each_other():
    whole = torch.arange(36.0).view(12, 3)
    assert overwritten(zip("abc", whole.chunk(3), strict=True)) == []
    assert overwritten(zip("abc", whole.view(4, 9).chunk(3, dim=1), strict=True)) == []


def test_one_tensor_under_several_names():
    tensor = torch.ones(SHAPE)
    assert overwritten((name, tensor) for name in "abc") == []


def test_a_buffer_that_is_used_again():
    assert overwritten(one_buffer()) == ["a", "b"]


def test_an_array_that_is_used_again():
    array = np.zeros(SHAPE)

    def one_array():
        for value, name in enumerate("abc"):
            array.fill(value)
            yield name, array.view()

    assert overwritten(one_array()) == ["a", "b"]
    assert overwritten((name, np.full(SHAPE, float(value))) for value, name in enumerate("abc")) == []
