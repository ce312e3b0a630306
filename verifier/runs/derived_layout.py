"""The model of a run with its layout: by the family's row, else derived on the run's mesh before its ranks start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from verifier.config import GoldenConfig, RoundtripConfig
from verifier.core.stage import Stage, in_stage
from verifier.core.work_folder import work_folder
from verifier.errors import VerifierError
from verifier.export.derived import DerivedLayout
from verifier.model.numbered import numbering_of
from verifier.platform.upstream_fixes import selected
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import Deadline, Resources
from verifier.runs.spec import Placement

MAX_NUMBERED_BYTES = 256 * 2**20
"""Largest checkpoint that is numbered: a rank keeps what it holds after each of four to seven passes."""


def with_layout(
    model: ModelUnderTest, config: GoldenConfig | RoundtripConfig, placement: Placement, resources: Resources,
    until: Deadline, progress: Callable[[str], None],
) -> ModelUnderTest:  # fmt: skip
    """Return the model with a derived layout if no row describes it; or with the reason why there is none.

    Adapters need rows, so a run with one gets none. Ranks that fail here are a reason too: the run's own ranks load the
    real weights by the same code, and what becomes of them is on record.
    """
    if model.layout is not None or model.lora_rank:
        return model
    numbering = numbering_of(model.checkpoint, model.dtype)
    if isinstance(numbering, str):
        return replace(model, why_no_layout=f"and the checkpoint cannot be numbered: {numbering}")
    if model.checkpoint.num_bytes > MAX_NUMBERED_BYTES:
        limit = f"{MAX_NUMBERED_BYTES // 2**20} MiB"
        return replace(model, why_no_layout=f"and the checkpoint is larger than the {limit} that are numbered")
    progress(f"deriving the layout: {len(numbering.passes)} numbered checkpoints")
    deadline_s = resources.collective_deadline_s
    try:
        with work_folder("layout") as work, in_stage(Stage.LOAD):
            first, *_ = resources.launcher(until).run(
                "verifier.runs.derived_layout_megatron:run",
                world_size=config.mesh.world_size,
                run_dir=work / "ranks",
                args={
                    "checkpoint": str(model.checkpoint.path), "mesh": config.mesh.to_dict(), "folder": str(work),
                    "dtype": model.dtype, "tier": model.tier, "deadline_s": deadline_s,
                    "fixes": sorted(selected(config.fixes)),
                },
                deadline_s=until.left("the layout was derived"),
                collective_deadline_s=deadline_s,
                mesh=config.mesh,
                num_gpus=placement.trainer_gpus,
            )  # fmt: skip
    except VerifierError as problem:
        return replace(model, why_no_layout=f"and none could be derived: {str(problem).partition(chr(10))[0]}")
    layout = DerivedLayout.from_json(first)
    if layout.gaps:
        others = f" and {len(layout.gaps) - 1:,} more" if len(layout.gaps) > 1 else ""
        return replace(model, why_no_layout=f"and the derived one has gaps: {layout.gaps[0]}{others}")
    return replace(model, derived=layout)
