"""The model of a run with its layout: by the family's row, else derived on the run's mesh before its ranks start.

That of a judged training run is made once, kept in the run's folder, and found there by resumes and replays.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import verifier
from verifier.config import GoldenConfig, RoundtripConfig
from verifier.config.training import TrainConfig
from verifier.core.outputs import write_whole
from verifier.core.stage import Stage, in_stage
from verifier.errors import VerifierError
from verifier.export.derived import DerivedLayout
from verifier.launch.fork_launcher import Launcher
from verifier.launch.rank import JobSpec
from verifier.model.numbered import numbering_of
from verifier.platform.provenance import installed_versions
from verifier.platform.upstream_fixes import selected
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import COLLECTIVE_DEADLINE_S, Deadline, Resources
from verifier.runs.spec import Placement

MAX_NUMBERED_BYTES = 256 * 2**20
"""Largest checkpoint that is numbered: a rank keeps what it holds after each of four to seven passes."""


def with_layout(
    model: ModelUnderTest, config: GoldenConfig | RoundtripConfig, placement: Placement, resources: Resources,
    work: Path, until: Deadline, progress: Callable[[str], None], within: Sequence[str] = (),
) -> ModelUnderTest:  # fmt: skip
    """Return the model with a derived layout if no row describes it; or with the reason why there is none.

    Adapters need rows, so a run with one gets none. All ranks see the folder `work`. `within` is a context manager that
    the ranks enter for it, as `RunSpec.within`.
    """
    if model.layout is not None or model.lora_rank:
        return model
    with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as folder:
        return derived(
            model, config.fixes, lambda: resources.launcher(until), Path(folder), until, progress,
            num_gpus=placement.trainer_gpus, collective_deadline_s=resources.collective_deadline_s, within=within,
        )  # fmt: skip


def may_derive(model: ModelUnderTest) -> bool:
    """Tell whether a layout can be derived, and gradients be judged by it, unless it turns out to have gaps."""
    return model.layout is None and not _why_not_numbered(model)


def derived(
    model: ModelUnderTest, fixes: Sequence[str], launcher: Callable[[], Launcher], work: Path, until: Deadline,
    progress: Callable[[str], None], *, num_gpus: int = 0, collective_deadline_s: float = COLLECTIVE_DEADLINE_S,
    within: Sequence[str] = (),
) -> ModelUnderTest:  # fmt: skip
    """Return a model without a row with a derived layout, or with the reason why there is none.

    Ranks that fail here are a reason too: the run's own ranks load the real weights by the same code, and what becomes
    of them is on record. `launcher` gives what starts them, and all of them see `work`, an empty folder. For `num_gpus`
    and `collective_deadline_s` see `JobSpec`, for `within` see `with_layout`.
    """
    if why := _why_not_numbered(model):
        return replace(model, why_no_layout=why)
    progress("deriving the layout from numbered checkpoints")
    args = {
        "checkpoint": str(model.checkpoint.path), "mesh": model.mesh.to_dict(), "folder": str(work),
        "dtype": model.dtype, "tier": model.tier, "deadline_s": collective_deadline_s,
        "fixes": sorted(selected(fixes)), "within": list(within),
    }  # fmt: skip
    try:
        with in_stage(Stage.LOAD):
            job = JobSpec(
                function="verifier.runs.derived_layout_megatron:run", world_size=model.mesh.world_size,
                run_dir=work / "ranks", args=args, deadline_s=until.left("the layout was derived"),
                collective_deadline_s=collective_deadline_s, mesh=model.mesh, num_gpus=num_gpus,
            )  # fmt: skip
            first, *_ = launcher().submit(job).wait()
    except VerifierError as problem:
        return replace(model, why_no_layout=f"and none could be derived: {str(problem).partition(chr(10))[0]}")
    layout = DerivedLayout.from_json(first)
    if layout.gaps:
        others = f" and {len(layout.gaps) - 1:,} more" if len(layout.gaps) > 1 else ""
        return replace(model, why_no_layout=f"and the derived one has gaps: {layout.gaps[0]}{others}")
    return replace(model, derived=layout)


def _why_not_numbered(model: ModelUnderTest) -> str:
    """Clause on why no numbered checkpoint can be written of a model; empty if one can."""
    numbering = numbering_of(model.checkpoint, model.dtype)
    if isinstance(numbering, str):
        return f"and the checkpoint cannot be numbered: {numbering}"
    if model.checkpoint.num_bytes > MAX_NUMBERED_BYTES:
        return f"and the checkpoint is larger than the {MAX_NUMBERED_BYTES // 2**20} MiB that are numbered"
    return ""


FOLDER = "layouts"


def with_run_layout(
    config: TrainConfig, model: ModelUnderTest, launcher: Launcher, run: Path, until: Deadline,
    progress: Callable[[str], None], *, num_gpus: int = 0,
) -> ModelUnderTest:  # fmt: skip
    """Return the model of a judged run with the layout that its folder keeps, or with one that is derived now.

    A run that is not judged derives none, and one with adapters has a row. Where there is none, it is said why. All
    ranks see the folder `run`.
    """
    model = with_kept_layout(config, model, run)
    if model.layout is not None or not config.verify.steps or config.lora.rank:
        return model
    work = run / FOLDER / "numbered"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was stopped
    work.mkdir(parents=True)
    try:
        model = derived(model, config.fixes, lambda: launcher, work, until, progress, num_gpus=num_gpus)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if model.derived is not None:
        write_whole(_file(config, model, run), json.dumps(model.derived.to_json()) + "\n")
    else:
        progress(f"no layout row for {model.checkpoint.architecture}, {model.why_no_layout}")
    return model


def with_kept_layout(config: TrainConfig, model: ModelUnderTest, run: Path) -> ModelUnderTest:
    """Return a model without a row with the layout that a run's folder keeps of it; without one, as it is."""
    if model.layout is not None or config.lora.rank:
        return model
    file = _file(config, model, run)
    return replace(model, derived=DerivedLayout.from_json(json.loads(file.read_text()))) if file.is_file() else model


def _file(config: TrainConfig, model: ModelUnderTest, run: Path) -> Path:
    """File of a layout, named by all that it was derived from."""
    checkpoint = model.checkpoint
    made_from = {
        "config": checkpoint.config, "mesh": model.mesh.to_dict(), "dtype": model.dtype, "tier": model.tier,
        "tensors": {name: [meta.dtype, *meta.shape] for name, meta in checkpoint.metas.items()},
        "fixes": sorted(selected(config.fixes)), "versions": installed_versions(), "verifier": verifier.__version__,
    }  # fmt: skip
    text = json.dumps(made_from, sort_keys=True)
    return run / FOLDER / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
