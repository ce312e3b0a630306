"""When a training run derives a layout, when it finds one that was kept, and what it says that has none.

What this does not exercise: ranks that derive and train (tests/dist/test_train_layouts.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.check import REGISTRY
from verifier.core.condition import Refusal
from verifier.core.manifest import Facts, Manifest
from verifier.export.derived import DerivedLayout
from verifier.launch.rank import JobSpec
from verifier.mesh import Mesh
from verifier.probes.training.sampled_step import require_judgeable
from verifier.probes.training.step_trace import step_manifest
from verifier.runs import derived_layout
from verifier.runs.derived_layout import with_kept_layout, with_run_layout
from verifier.runs.model_under_test import DERIVED, WRITTEN, ModelUnderTest, open_model
from verifier.runs.resources import Deadline
from verifier.trainer.ranks import WorkerSpec, start_ranks

LAYOUT = DerivedLayout(mesh=Mesh(), rows=[[[]]], tied=False, gaps=())
GAPS = replace(LAYOUT, gaps=("`a` is in no parameter",))
FIRST = Facts(step=1, updates=(1,), sampled=True, loaded=True)
WHY = "and the derived one has gaps: `a` is in no parameter"


class _Launcher:
    """In a launcher's place: ranks that answer with a layout; keeps the jobs."""

    def __init__(self, layout: DerivedLayout = LAYOUT) -> None:
        self.jobs: list[JobSpec] = []
        self._layout = layout

    def submit(self, spec: JobSpec, on_progress: Any = None) -> Any:
        self.jobs.append(spec)
        return SimpleNamespace(wait=lambda: [self._layout.to_json()])


def _config(*knobs: str) -> TrainConfig:
    judged = () if "verify.steps=false" in knobs else ("verify.steps=true",)
    return load(TrainConfig, overrides=["model=tiny:qwen3", *judged, *knobs])[0]


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelUnderTest:
    """A model with a setting that its family's row does not describe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = open_model("tiny:qwen3", "float32", Mesh())
    config = {**model.checkpoint.config, "attention_bias": True}
    return replace(model, checkpoint=replace(model.checkpoint, config=config))


def _with(model: ModelUnderTest, run: Path, launcher: _Launcher, *knobs: str, said: list[str] | None = None) -> Any:
    says = [] if said is None else said
    return with_run_layout(_config(*knobs), model, launcher, run, Deadline(60), says.append)


def test_a_layout_is_derived_once_and_kept(unknown: ModelUnderTest, tmp_path: Path) -> None:
    launcher, run = _Launcher(), tmp_path / "run"
    found = _with(unknown, run, launcher)
    assert (found.layout, found.layout_kind, len(launcher.jobs)) == (LAYOUT, DERIVED, 1)
    assert _with(unknown, run, launcher) == found
    assert with_kept_layout(_config(), unknown, run) == found
    assert len(launcher.jobs) == 1
    assert [item.suffix for item in (run / "layouts").iterdir()] == [".json"]


def test_another_mesh_or_version_has_another_layout(
    unknown: ModelUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, run = _Launcher(), tmp_path / "run"
    _with(unknown, run, launcher)
    other = replace(unknown, mesh=Mesh(dp=2))
    assert with_kept_layout(_config("mesh.dp=2"), other, run) is other
    assert with_kept_layout(_config("fixes=[megatron-7081]"), unknown, run) is unknown
    monkeypatch.setattr(derived_layout, "installed_versions", lambda: {"megatron-core": "0.99"})
    assert with_kept_layout(_config(), unknown, run) is unknown
    _with(unknown, run, launcher)
    assert len(launcher.jobs) == 2


def test_nothing_is_derived_without_judging_with_adapters_or_with_a_row(
    unknown: ModelUnderTest, tmp_path: Path
) -> None:
    launcher, run = _Launcher(), tmp_path / "run"
    assert _with(unknown, run, launcher, "verify.steps=false") is unknown
    assert _with(unknown, run, launcher, "lora.rank=8") is unknown
    known = open_model("tiny:qwen3", "float32", Mesh())
    assert _with(known, run, launcher) is known
    assert step_manifest(_config(), known, FIRST).layout == WRITTEN
    assert (launcher.jobs, run.exists()) == ([], False)


def test_ranks_get_the_layout(unknown: ModelUnderTest, tmp_path: Path) -> None:
    launcher = _Launcher()
    for model in (replace(unknown, derived=LAYOUT), unknown):
        start_ranks(_config(), model, launcher, tmp_path, Deadline(60), print)
    told, untold = (WorkerSpec.from_json(job.args).layout for job in launcher.jobs)
    assert (DerivedLayout.from_json(told or {}), untold) == (LAYOUT, None)


def test_a_derived_layout_judges_a_step_as_a_row_does(unknown: ModelUnderTest) -> None:
    config = _config("verify.every=1", "mesh.dp=2")
    model = replace(unknown, mesh=Mesh(dp=2))
    written = step_manifest(config, open_model("tiny:qwen3", "float32", Mesh(dp=2)), FIRST)
    derived = step_manifest(config, replace(model, derived=LAYOUT), FIRST)
    assert refusals(derived) == refusals(written)
    assert not {"WGT001", "WGT002", "LSS001", "TRN006"} & refusals(derived).keys()
    assert derived.layout == DERIVED


def test_a_run_goes_on_without_a_layout_that_has_gaps(unknown: ModelUnderTest, tmp_path: Path) -> None:
    config, said = _config("verify.every=1"), list[str]()
    require_judgeable(config, unknown)
    found = _with(unknown, tmp_path / "run", _Launcher(GAPS), "verify.every=1", said=said)
    assert found.layout is None
    assert said[1:] == [f"no layout row for Qwen3ForCausalLM, {WHY}"]
    assert list((tmp_path / "run" / "layouts").iterdir()) == []
    first, second = (
        step_manifest(config, found, Facts(step=step, updates=(step,), loaded=step == 1)) for step in (1, 2)
    )
    assert first.layout == ""
    missing = Refusal(why=f"no layout for the model's family, {WHY}", gap=True)
    assert [refusals(first)[code] for code in ("WGT001", "WGT002", "TRN006")] == [missing] * 3
    assert "WGT001" in refusals(second)
    assert not refusals(second)["WGT001"].gap
    reason = "the gradients of tiny:qwen3 cannot be judged: its family has no layout"
    assert refusals(first)["LSS001"] == refusals(second)["LSS001"] == Refusal(why=reason, gap=True)


def refusals(manifest: Manifest) -> dict[str, Refusal]:
    """Code -> why the check does not judge such a run."""
    return {code: why for code, item in REGISTRY.items() if (why := item.applies(manifest)) is not None}
