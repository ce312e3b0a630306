"""Positions that a trainer's model takes: one row, or one for each axis of an image."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifier.megatron.step_megatron import _positions

POSITIONS = [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("kind", "shape"), [("rope", (1, 5)), ("mrope", (3, 1, 5))])
def test_text_has_the_same_positions_on_every_axis(kind: str, shape: tuple[int, ...]) -> None:
    trainer: Any = SimpleNamespace(provider=SimpleNamespace(position_embedding_type=kind))
    found = _positions(trainer, torch.tensor(POSITIONS))
    assert found.shape == shape
    assert found.reshape(-1, 5).unique(dim=0).tolist() == [POSITIONS]
