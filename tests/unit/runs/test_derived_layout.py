"""When a layout is derived, and what a run says that has none. The derivation itself runs in tests/dist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import GoldenConfig
from verifier.core.check import REGISTRY
from verifier.core.condition import Refusal
from verifier.errors import InternalError, VerifierError
from verifier.export.derived import DerivedLayout
from verifier.launch.rank import JobSpec
from verifier.mesh import Mesh
from verifier.model.checkpoint import TensorHeader
from verifier.runs import derived_layout
from verifier.runs.derived_layout import with_layout
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.runs.resources import Deadline, Resources
from verifier.runs.run_manifest import manifest_of
from verifier.runs.spec import Placement, run_spec


class _Ranks:
    """In a launcher's place: ranks that answer with a layout, or fail."""

    def __init__(self, answer: Mapping[str, Any] | VerifierError) -> None:
        self._answer = answer

    def submit(self, spec: JobSpec) -> Any:
        if isinstance(self._answer, VerifierError):
            raise self._answer
        return SimpleNamespace(wait=lambda: [self._answer, *({} for _ in range(spec.world_size - 1))])


class _Resources(Resources):
    def __init__(self, answer: Mapping[str, Any] | VerifierError) -> None:
        super().__init__()
        self._ranks = _Ranks(answer)

    def launcher(self, until: Deadline) -> Any:
        return self._ranks


CONFIG = GoldenConfig(model="tiny:qwen3")
LAYOUT = DerivedLayout(mesh=Mesh(), rows=[[[]]], tied=False, gaps=())


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelUnderTest:
    """A model of a family with a row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return open_model("tiny:qwen3", "float32", Mesh())


@pytest.fixture
def unknown(known: ModelUnderTest) -> ModelUnderTest:
    """The same model with a setting that the row does not describe."""
    config = {**known.checkpoint.config, "attention_bias": True}
    return replace(known, checkpoint=replace(known.checkpoint, config=config))


def _with(model: ModelUnderTest, answer: Mapping[str, Any] | VerifierError) -> ModelUnderTest:
    work = model.checkpoint.path.parent
    return with_layout(model, CONFIG, Placement(), _Resources(answer), work, Deadline(60), print)


def test_a_row_goes_first(known: ModelUnderTest) -> None:
    assert _with(known, InternalError("no ranks are started")) is known
    assert manifest_of(CONFIG, known, Placement()).layout == "hand-written row"
    assert run_spec(CONFIG, known, Placement(), trace="t", work="w").layout is None


def test_an_adapter_needs_a_row(unknown: ModelUnderTest) -> None:
    adapted = replace(unknown, lora_rank=8)
    assert _with(adapted, InternalError("no ranks are started")) is adapted


def test_a_derived_layout_judges_as_a_row_does(unknown: ModelUnderTest) -> None:
    found = _with(unknown, LAYOUT.to_json())
    assert (found.layout, found.judges_gradients) == (LAYOUT, True)
    manifest = manifest_of(CONFIG, found, Placement())
    assert manifest.layout == "derived from a numbered checkpoint, proven by tiling and the forward"
    assert REGISTRY["WGT001"].applies(manifest) is None
    assert run_spec(CONFIG, found, Placement(), trace="t", work="w").layout == LAYOUT.to_json()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (replace(LAYOUT, gaps=("`a` is in no parameter", "`b` too")).to_json(),
         "and the derived one has gaps: `a` is in no parameter and 1 more"),
        (InternalError("rank 1 failed: no\ntraceback"), "and none could be derived: rank 1 failed: no"),
    ],
)  # fmt: skip
def test_a_layout_with_gaps_is_not_used(unknown: ModelUnderTest, answer: Any, why: str) -> None:
    found = _with(unknown, answer)
    assert (found.layout, found.judges_gradients) == (None, False)
    manifest = manifest_of(CONFIG, found, Placement())
    assert manifest.layout == ""
    refusal = REGISTRY["WGT001"].applies(manifest)
    assert refusal == Refusal(why=f"no layout for the model's family, {why}", gap=True)


def test_a_large_checkpoint_is_not_numbered(unknown: ModelUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_layout, "MAX_NUMBERED_BYTES", 2**20)
    found = _with(unknown, InternalError("no ranks are started"))
    assert found.why_no_layout == "and the checkpoint is larger than the 1 MiB that are numbered"


def test_a_dtype_without_numbers(unknown: ModelUnderTest) -> None:
    name, header = next(iter(unknown.checkpoint.metas.items()))
    odd = TensorHeader(dtype="bool", shape=header.shape, num_bytes=1, shard=header.shard)
    metas = {**unknown.checkpoint.metas, name: odd}
    found = _with(replace(unknown, checkpoint=replace(unknown.checkpoint, metas=metas)), LAYOUT.to_json())
    assert (
        found.why_no_layout
        == f"and the checkpoint cannot be numbered: `{name}` is stored in bool, which cannot hold a number"
    )
