"""LGP016: what adapters multiply by, on a module that scales as megatron-bridge's do, in both of its types.

What this does not exercise: real adapters (tests/dist/test_train_clean.py), bugs that LGP016 catches (tests/faults).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.mesh import Mesh
from verifier.stages.logprob import probe_adapter_scales_megatron as adapter_scales_megatron
from verifier.stages.logprob.checks_configs import adapter_scaled_otherwise
from verifier.stages.logprob.probe_adapter_scales_megatron import adapter_scales
from verifier.stages.logprob.records import AdapterScales


class Matrix(torch.nn.Module):
    """A linear that returns its output and no bias, as megatron-core's do."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(values)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows @ self.values, None


class ParallelLinearAdapter(torch.nn.Module):
    """An adapter of that name which multiplies by a scale, and hands on the rows of one of so many ranks."""

    def __init__(self, scale: float, dtype: torch.dtype, *, zero: bool, ranks: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.linear_in = Matrix(torch.randn(6, 3, generator=draw).to(dtype))
        self.linear_out = Matrix((torch.randn(3, 6, generator=draw) * (not zero)).to(dtype))
        self.scale, self.ranks = scale, ranks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        whole = self.linear_out(self.linear_in(rows)[0])[0]
        return whole.chunk(self.ranks)[0] * self.scale


def wrong(
    monkeypatch: pytest.MonkeyPatch, scale: float, dtype: torch.dtype = torch.float32, *, zero: bool = False,
    ranks: int = 1,
) -> list[str]:  # fmt: skip
    """Adapters that are scaled wrongly where 2 is asked for."""
    monkeypatch.setattr(adapter_scales_megatron.dist, "get_rank", lambda: 0)
    found: list[Any] = []
    module = torch.nn.ModuleDict({"q": ParallelLinearAdapter(scale, dtype, zero=zero, ranks=ranks)})
    trainer: Any = SimpleNamespace(chunks=[module], mesh=Mesh())
    with adapter_scales(SimpleNamespace(emit=found.append), trainer, "update 1", 1, asked=2.0):  # type: ignore[arg-type]
        for seed in (1, 2):
            module["q"](torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype))
    assert len(found) == 1
    assert isinstance(found[0], AdapterScales)
    trace = Trace(Manifest(complete=True), found, {}.__getitem__)
    return [item.actual for item in adapter_scaled_otherwise(trace) if not item.same]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_alpha_over_rank_holds_and_alpha_alone_does_not(monkeypatch, dtype, ranks):
    assert wrong(monkeypatch, 2.0, dtype, ranks=ranks) == []
    assert wrong(monkeypatch, 16.0, dtype, ranks=ranks) == ["16"]


def test_a_scale_that_is_off_by_little_is_seen_in_fp32(monkeypatch):
    assert wrong(monkeypatch, 2.00001) == ["2.00001"]


def test_an_adapter_that_has_not_moved_holds_at_any_scale(monkeypatch):
    assert wrong(monkeypatch, 16.0, zero=True) == []
