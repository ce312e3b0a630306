"""Checkpoints of published widths: their sizes, and the values of their matrices.

What this does not exercise: that such a checkpoint is loaded and exported (tests/h100/test_golden_gpu.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from verifier.model.families import FAMILIES, Content, TensorSpec, family_of, tensors_of
from verifier.model.tiny import TINY
from verifier.model.wide import WIDE, WIDE_MODELS, hashed, write_wide


def _matrix(name: str, *shape: int) -> torch.Tensor:
    return hashed(TensorSpec(name=name, shape=shape, content=Content.MATRIX), "bfloat16", "stream")


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_values"),
    [
        ("qwen3-30b-a3b", 789, 1_868_573_184),
        ("deepseek-v3", 221, 5_487_041_600),
        ("nemotron-3-nano", 287, 2_103_002_752),
    ],
)
def test_tensor_table_of_each_wide_model(name: str, num_tensors: int, num_values: int) -> None:
    family, sizes = WIDE[name]
    config = {"architectures": [FAMILIES[family].architecture], **sizes}
    assert family_of(config) is FAMILIES[family]
    specs = list(tensors_of(FAMILIES[family], config))
    assert len({spec.name for spec in specs}) == len(specs) == num_tensors
    assert sum(math.prod(spec.shape) for spec in specs) == num_values


def test_matrices_are_spread_like_small_ones_and_no_row_is_like_another() -> None:
    values = _matrix("a", 4096, 768)
    assert values.dtype == torch.bfloat16
    assert values.float().std().item() == pytest.approx(768**-0.5, rel=0.005)
    assert abs(values.float().mean().item()) < 1e-4
    assert not (values == 0).any()
    assert values.view(torch.int16).unique(dim=0).shape[0] == 4096
    near = torch.corrcoef(torch.stack([values[:-1].float().flatten(), values[1:].float().flatten()]))[0, 1]
    assert abs(near.item()) < 0.005


def test_pieces_join_without_a_seam_and_names_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _matrix("a", 300, 7)
    monkeypatch.setattr("verifier.model.wide._PIECE", 64)
    assert torch.equal(_matrix("a", 300, 7), whole)
    assert not torch.equal(_matrix("b", 300, 7), whole)


def test_same_values_on_every_machine() -> None:
    assert _matrix("a", 2, 4).view(torch.int16).tolist() == [
        [16111, -16565, -16575, 16055],
        [-16642, 16145, -16766, -16646],
    ]


def test_every_kind_of_value_is_written(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verifier.model.checkpoint import open_checkpoint

    monkeypatch.setitem(WIDE_MODELS, "wide:small", TINY["nemotron-h"])
    checkpoint = open_checkpoint(write_wide("small", tmp_path))
    dtypes = {checkpoint.meta(name).dtype for name in checkpoint.names()}
    assert dtypes == {"bfloat16", "float32"}
    assert len(checkpoint.names()) == 111
