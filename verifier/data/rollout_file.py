"""A batch of rollouts as one safetensors file of columns, with any further values per token.

Arrays are flat over the tokens of all rollouts, in order; ids, groups, lengths and rewards are JSON in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verifier.core import ragged
from verifier.data.rollout import PROMPT_VALUES, Rollout
from verifier.errors import UsageError

_FIELDS = ("tokens", *PROMPT_VALUES)
_COLUMN = "column."
_ROUTES = "routes"


def save_rollouts(
    path: Path, rollouts: Sequence[Rollout], columns: Mapping[str, Sequence[np.ndarray]] | None = None
) -> None:
    """Write a batch; the file appears when it is whole.

    Args:
        path: file to write.
        rollouts: at least one; all or none have routes.
        columns: name -> per rollout [L] values of its tokens.

    Raises:
        UsageError: the file cannot be written.
    """
    from safetensors.numpy import save

    arrays = {name: np.concatenate([getattr(item, name) for item in rollouts]) for name in _FIELDS}
    arrays |= {_COLUMN + name: np.concatenate([*values]) for name, values in (columns or {}).items()}
    if routes := [item.routes for item in rollouts if item.routes is not None]:
        arrays[_ROUTES] = np.concatenate(routes)
    about = {
        "ids": [item.id for item in rollouts],
        "groups": [item.group for item in rollouts],
        "lengths": [len(item) for item in rollouts],
        "prompt_lengths": [item.prompt_length for item in rollouts],
        "rewards": [item.reward for item in rollouts],
    }
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_bytes(save(arrays, {"rollouts": json.dumps(about)}))
        aside.replace(path)
    except OSError as problem:
        raise UsageError(f"the batch `{path}` cannot be written: {problem.strerror}") from problem


def load_rollouts(path: Path) -> tuple[list[Rollout], dict[str, list[np.ndarray]]]:
    """Read what `save_rollouts` wrote: the rollouts and the further values."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["rollouts"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    parts = {name: ragged.split(array, about["lengths"]) for name, array in arrays.items()}
    rollouts = [
        Rollout(
            id=about["ids"][at], group=about["groups"][at], prompt_length=about["prompt_lengths"][at],
            reward=about["rewards"][at], routes=parts[_ROUTES][at] if _ROUTES in parts else None,
            **{name: parts[name][at] for name in _FIELDS},
        )
        for at in range(len(about["ids"]))
    ]  # fmt: skip
    return rollouts, {name.removeprefix(_COLUMN): parts[name] for name in parts if name.startswith(_COLUMN)}
