"""Rows of recorded rollouts for tests: of a rollout, and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from verifier.data.recorded import RolloutRow
from verifier.data.rollout import Rollout


def row_of(rollout: Rollout) -> RolloutRow:
    """Row of a rollout; log-probabilities keep their float32 value."""
    response = slice(rollout.prompt_length, None)
    columns = {
        name: tuple(getattr(rollout, name)[response].tolist()) for name in ("sampled", "mask", "logprobs", "versions")
    }
    return RolloutRow(
        id=rollout.id, group=rollout.group, prompt=tuple(rollout.tokens[: rollout.prompt_length].tolist()),
        response=tuple(rollout.tokens[response].tolist()), reward=float(rollout.reward), **columns,
        routes=None if rollout.routes is None else tuple(tuple(map(tuple, token)) for token in rollout.routes.tolist()),
    )  # fmt: skip


def write_recorded(path: Path, rows: Sequence[RolloutRow]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(msgspec.json.encode(row).decode() + "\n" for row in rows))
