"""Optimizer steps that the oracle judges: what it reads of each, beside the folders of weights, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from verifier.core.outputs import full_disk_refused
from verifier.core.record import Measurement, Record, real
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout, adapters_of
from verifier.export.sharding import Owners
from verifier.mesh import Mesh
from verifier.oracle.oracle import Oracle
from verifier.stages.loss.records import GradientRecord, Objective, RouterChoices
from verifier.stages.pack.records import Rollouts

GAPS = {
    "gradient": "|the trainer's reduced gradient - transformers' in float32|, in float64",
    "step": "|the live weight - Adam's in float64, less half a step of its dtype|, in learning rates",
}
"""Measurements of `GradientRecord`, and how they are made."""
NO_STEP = {"clip_grad": 0.0, "beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8, "weight_decay": 0.0}
"""Settings that the oracle takes where nobody steps; only Adam's step depends on them."""
REINFORCE = {"loss": "cispo", "clip_low": 0.0, "clip_high": 0.0, "kl_kind": "k2"}
"""Options by which a loss of training is that of an `Objective`: with the ratio clipped to 1, -reward * logprob."""
_READ = ("weights", "gradients", "exp_avg", "exp_avg_sq", "master", "sampled")
"""Kinds of folders that an answer depends on."""


def objective_of(objective: Objective) -> dict[str, Any]:
    """Return what `policy_hf.judge_updates` takes for an `Objective`, of inputs by `policy_columns`."""
    return {**REINFORCE, **content_of(objective), "kl_weight": objective.drift_weight}


def policy_columns(record: Rollouts, arrays: Mapping[str, np.ndarray], factor: float = 1.0) -> dict[str, np.ndarray]:
    """Inputs of an `Objective`'s mean over the tokens of recorded rollouts, times a factor."""
    reported, mask = np.nan_to_num(arrays["logprobs"]), arrays["mask"]
    return {
        "lengths": np.array(record.lengths), "tokens": arrays["tokens"], "mask": mask,
        "weight": np.full(len(mask), factor / mask.sum()),
        "advantage": np.repeat(np.array(record.rewards, np.float64), record.lengths),
        "divisor": reported, "reference": reported,
    }  # fmt: skip


def save_inputs(
    folder: Path, number: int, columns: Mapping[str, np.ndarray], routes: Sequence[np.ndarray] = (),
    margin: float | None = None,
) -> None:  # fmt: skip
    """Write ``inputs-n`` of an update, see `policy_hf.judge_updates`.

    `columns` has the "lengths" of sequences, and what the loss reads of all their tokens; `routes` is what routers are
    told, [M, 2 + K] of each sequence, and `margin` the ``route_margin``.
    """
    arrays = {**columns, "mask": columns["mask"].astype(np.uint8)}
    if routes:
        arrays |= {"route_counts": np.array([len(rows) for rows in routes]), "routes": np.concatenate([*routes])}
        arrays |= {} if margin is None else {"route_margin": np.full(1, margin, np.float32)}
    file = folder / f"inputs-{number}.safetensors"
    with full_disk_refused(file):
        save_file(arrays, file)


def routes_of(parts: Sequence[np.ndarray], num_sequences: int) -> list[np.ndarray]:
    """Routes that ranks saw, [N, 3 + K] each by sequence, position and global layer, as [M, 2 + K] of each sequence.

    Nothing where no rank saw any. Ranks of one tensor-parallel group may see the same tokens.
    """
    if not parts:
        return []
    rows = np.concatenate([*parts])
    rows = rows[np.unique(rows[:, :3], axis=0, return_index=True)[1]]
    return [rows[rows[:, 0] == at, 1:] for at in range(num_sequences)]


def judged(
    oracle: Oracle, folder: Path, rule: Mapping[str, Any], objective: Mapping[str, Any],
    updates: Sequence[Mapping[str, Any]], layout: ModelLayout | DerivedLayout | None, mesh: Mesh, device: str = "cpu",
    *, lora: tuple[int | None, Sequence[str]] = (None, ()), from_first: bool = False,
) -> list[GradientRecord]:  # fmt: skip
    """Records of what `policy_hf.judge_updates` says of the updates in a folder, under version 0.

    `layout` says which ranks hold what, None where nobody knows; `lora` has the rank of adapters and their linears.
    """
    read = [folder, *(path for kind in _READ for path in sorted(folder.glob(f"{kind}-*")))]
    offsets = layout.offsets() if isinstance(layout, DerivedLayout) else {}
    arguments = (rule, objective, updates, device, offsets, from_first)
    rows = oracle.ask("policy_hf:judge_updates", [folder], *arguments, read=read)
    adapters = adapters_of(layout, lora[1], lora[0]) if lora[0] and isinstance(layout, ModelLayout) else None
    owners = Owners((adapters or layout).placements, mesh) if layout else None
    return [_gradient_record(row, owners, mesh) for row in rows]


def _gradient_record(row: Mapping[str, Any], owners: Owners | None, mesh: Mesh) -> GradientRecord:
    fields = _fields(row)
    for key in GAPS.keys() & row.keys():
        value, index = row[key]
        rank = owners.rank_of(row["name"], index) if owners else None
        fields[key] = Measurement(
            value=real(value), scale=fields["gradient_scale"], index=tuple(index), rank=rank,
            coordinate="" if rank is None else str(mesh.coordinate(rank)), how=GAPS[key],
        )  # fmt: skip
    return GradientRecord(**fields)


def choices(
    oracle: Oracle, before: Path, name: str, version: int, tokens: Sequence[Sequence[int]],
    routes: Sequence[np.ndarray], dtype: str, device: str = "cpu", places: Sequence[int] | None = None,
) -> Iterator[RouterChoices]:  # fmt: skip
    """Records of how good the experts were that routers chose by themselves, see `choices_hf.choice_gaps`.

    `before` has the weights that they chose by, `places` the index of each sequence in the update, by default its own.
    """
    asked = (tokens, [rows.tolist() for rows in routes], dtype, device)
    for row in oracle.ask("choices_hf:choice_gaps", [before], *asked):
        at, position = row["place"]
        place = (at if places is None else places[at], position)
        yield RouterChoices(name=name, version=version, **{**_fields(row), "place": place})


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: real(item) if isinstance(item, float) else item for key, item in row.items()}


def content_of(record: Record) -> dict[str, Any]:
    """Fields of a record besides those that say whose it is."""
    return {name: getattr(record, name) for name in record.__struct_fields__ if name not in Record.__struct_fields__}
