"""Which cuDNN runs; no GPU is needed to compare two versions.

What this does not exercise: the library that Transformer Engine finds; tests/h100/test_attention.py says which it was.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from verifier.platform.cuda import another_cudnn


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ((9, 19, 0), ""),
        ((9, 14, 0), "Transformer Engine runs cuDNN 9.14.0, torch was built against 9.19.0: to use that one, set "),
    ],
)
def test_another_cudnn_than_torchs_is_named(runs, said, monkeypatch):
    utils = SimpleNamespace(get_cudnn_version=lambda: runs)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.utils", utils)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    monkeypatch.setattr(torch._C, "_cudnn", SimpleNamespace(getCompileVersion=lambda: (9, 19, 0)), raising=False)
    found = another_cudnn()
    assert found.startswith(said)
    assert bool(found) is bool(said)
