"""The fault smoke: a few faults of different stages that share one clean run, and must be caught on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifier.faults
from verifier.faults.matrix import chosen
from verifier.gate.gate_result import Cell
from verifier.model.families import size_if_any

SMOKE = (
    "expert-left-at-init", "rope-base-default", "step-dropped", "norm-written-by-export", "router-rounded-on-the-wire",
)  # fmt: skip
"""Faults of load, logprob, train, export and transport."""
SMOKE_MODEL = "tiny:qwen3-moe"
ROLLOUTS = Path(verifier.faults.__path__[0]) / "rollouts"
"""Recorded rollouts of `tiny:add`, whose tokens any model trains on that has as many."""
_ROLLOUT_VOCABULARY = 64
"""More than the greatest of their tokens."""


def fault_cells(ids: Sequence[str]) -> list[Cell]:
    """Cell of each fault; those of `SMOKE` where none is named.

    Raises:
        UsageError: an unknown fault, or one that needs a GPU.
    """
    return [
        Cell(
            id=f"faults {fault.id}", kind="faults", model=fault.model, dtype=fault.dtype, mesh=fault.mesh.label(),
            engine=fault.engine if fault.engine in ("hf", "vllm") else "", fault=fault.id, stage=fault.stage.label,
            carries=("the checks are alive here",), words=(fault.id,),
        )
        for fault in chosen(ids or SMOKE)
    ]  # fmt: skip


def rollouts_fit(sizes: Mapping[str, Any]) -> bool:
    """True if a model of these sizes has all tokens of the recorded rollouts."""
    return (size_if_any(sizes, "vocab_size") or 0) >= _ROLLOUT_VOCABULARY
