"""The derived layout of a judged run: made once, kept in the run's folder, and found there by resumes and replays."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import verifier
from verifier.config.training import TrainConfig
from verifier.core.outputs import write_whole
from verifier.export.derived import DerivedLayout
from verifier.platform.provenance import installed_versions
from verifier.platform.upstream_fixes import selected
from verifier.runs.derived_layout import JobLauncher, derived
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import Deadline

FOLDER = "layouts"


def with_run_layout(
    config: TrainConfig, model: ModelUnderTest, launcher: JobLauncher, run: Path, until: Deadline,
    progress: Callable[[str], None], *, num_gpus: int = 0,
) -> ModelUnderTest:  # fmt: skip
    """Return the model of a judged run with the layout that its folder keeps, or with one that is derived now.

    A run that is not judged derives none, and one with adapters has a row. Where there is none, it is said why.

    Args:
        config: of the run.
        model: of the run.
        launcher: of its ranks.
        run: its folder, which all ranks see.
        until: deadline of the run.
        progress: called with a line of text.
        num_gpus: see `JobSpec.num_gpus`.
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
