"""Records of the oracle's measurements of one tensor's gradient and step, with the element and its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifier.core.record import Measurement, real
from verifier.core.records_tokens import GradientRecord
from verifier.export.owners import Owners
from verifier.mesh import Mesh

GRADIENT = "|the trainer's reduced gradient - transformers' in float32|, in float64"
STEP = "|the live weight - Adam's in float64, less half a step of its dtype|, in learning rates"


def gradient_record(row: Mapping[str, Any], owners: Owners | None, mesh: Mesh) -> GradientRecord:
    """Return the record of one row of `verifier.oracle.step_hf.judge_steps`.

    Args:
        row: of one tensor and version; "gradient" and "step" are (greatest gap, its index).
        owners: which rank holds an element; None where the family has no layout.
        mesh: parallel sizes.
    """

    def measured(found: tuple[float, Sequence[int]] | None, how: str) -> Measurement | None:
        if found is None:
            return None
        value, index = found
        rank = owners.rank_of(row["name"], index) if owners else None
        at = "" if rank is None else str(mesh.coordinate(rank))
        scale = real(row["gradient_scale"])
        return Measurement(value=real(value), scale=scale, index=tuple(index), rank=rank, coordinate=at, how=how)

    numbers: dict[str, Any] = {key: real(item) if isinstance(item, float) else item for key, item in row.items()}
    numbers["gradient"] = measured(row.get("gradient"), GRADIENT)
    numbers["step"] = measured(row.get("step"), STEP)
    return GradientRecord(**numbers)
