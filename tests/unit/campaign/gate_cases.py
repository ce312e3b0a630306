"""Made-up cells, findings and waivers of gates."""

from __future__ import annotations

from typing import Any

from verifier.config import Waiver
from verifier.report.gate_result import Cell, CellResult, GateFinding

CELL = Cell(
    id="roundtrip tiny:nemotron-h bf16 1-rank hf", kind="roundtrip", model="tiny:nemotron-h", dtype="bfloat16",
    mesh="1 rank", engine="hf", family="nemotron-h", words=("model=tiny:nemotron-h", "engine.kind=hf"),
)  # fmt: skip
FAULT = Cell(
    id="faults step-dropped", kind="faults", model="tiny:qwen3-moe", dtype="float32", mesh="1 rank", engine="hf",
    fault="step-dropped", stage="train", words=("step-dropped",),
)  # fmt: skip
ROWS: dict[str, str] = {
    "check": "WGT001", "family": "nemotron-h", "issue": "https://github.com/radixark/miles/issues/975",
    "owner": "ada", "reason": "decays are rounded upstream", "until": "2027-01-31",
}  # fmt: skip


def waiver(**changed: str) -> Waiver:
    """A waiver of WGT001 for one family until the end of January 2027."""
    return Waiver(**{**ROWS, **changed})


def finding(check: str = "WGT001", stage: str = "load", place: tuple[int, ...] = (0, 0, 0)) -> GateFinding:
    """A violation."""
    sentence = f"{check} tensor-differs: 6 of 40 tensors differ"
    text = f"{sentence}\n  where     : {stage}, version 0, `A_log`\n  replay    : `verifier replay T --check {check}`"
    return GateFinding(
        check=check, name="tensor-differs", sentence=sentence, text=text, violated=True, stage=stage, place=place
    )


def violated(*findings: GateFinding, **changed: Any) -> CellResult:
    """A violated cell."""
    found = findings or (finding(),)
    values = {"cell": CELL, "status": "violated", "findings": found, "first_bad_stage": found[0].stage, "seconds": 12.5}
    return CellResult(**{**values, **changed})
