"""Routes that a run replays: those of recorded rollouts are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verifier.data.recorded import RolloutRow, Routes
from verifier.data.rollout import MISSING_ROUTE
from verifier.errors import ContractError, UsageError
from verifier.model.families import JSON, moe_layers_of, num_experts_of

SCORED = {"current": "old", "reference": "reference"}
"""Weights that score a batch -> name of the pass."""


def require_routes(file: Path, rows: Sequence[RolloutRow], sizes: Mapping[str, JSON]) -> None:
    """Refuse recorded rollouts whose routes the routers of a model cannot take.

    Args:
        file: of the rows.
        rows: of the file.
        sizes: config.json of the model.

    Raises:
        UsageError: names the rollout, and what its routes are and have to be.
    """
    shape, num_experts = [len(moe_layers_of(sizes)), sizes["num_experts_per_tok"]], num_experts_of(sizes)
    for row in rows:
        where = f"grpo.replay_routes is true, but rollout `{row.id}` of `{file}`"
        if row.routes is None:
            raise UsageError(f"{where} has no routes: record them, or leave it out")
        if any([len(t), len(k)] != shape for t in row.routes for k in t):
            raise UsageError(
                f"{where} has routes of other sizes than the model's, [layers, experts per token] = {shape}"
            )
        ordered = np.sort(np.array(row.routes), axis=-1)
        missing = (ordered == MISSING_ROUTE).all(-1).all(-1)
        kept = ordered[:-1] if missing[-1] else ordered
        if kept.size and (kept.min() < 0 or kept.max() >= num_experts or (np.diff(kept, axis=-1) == 0).any()):
            raise UsageError(f"{where} has routes that are not different experts below {num_experts}")


def whole_routes(name: str, routes: Routes, length: int) -> Routes:
    """Routes of all tokens of a rollout but its last, which the engine does not run."""
    if len(routes) != length - 1:
        raise ContractError(
            f"rollout `{name}`: the engine reported the routes of {len(routes)} tokens, it ran {length - 1}"
        )
    return (*routes, tuple((MISSING_ROUTE,) * len(experts) for experts in routes[0]))
