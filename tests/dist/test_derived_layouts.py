"""The derived layout against the hand-written one, element by element, on real ranks of every family and mesh.

Neither knows of the other: one is read from what Megatron-Bridge makes of a numbered checkpoint, the other is written
after Megatron's layers. `-m slow` has every mesh of the table of clean runs.

What this does not exercise: judging by a derived layout (test_roundtrip.py); imports that err (tests/unit/export).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.clean_case import cases
from tests.layouts import differences, numbered
from verifier.export.derived import DerivedLayout
from verifier.export.names import layout_of
from verifier.launch.fork_launcher import ForkLauncher
from verifier.mesh import Mesh
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import copies_of
from verifier.model.tiny import write_tiny

pytestmark = pytest.mark.slow

Case = tuple[str, Mesh, str]
DEFAULT: tuple[Case, ...] = (
    ("qwen3-tied", Mesh(pp=2, vpp=2), "float32"),
    ("qwen3-moe", Mesh(tp=2, ep=2), "bfloat16"),
    ("deepseek-v3", Mesh(tp=2, pp=2, ep=2), "float32"),
    ("nemotron-h", Mesh(tp=2), "float32"),
    ("deepseek_v3-mtp", Mesh(tp=2, pp=2), "float32"),
)
SLOW = sorted(
    {(case.family, case.mesh, case.dtype) for case in cases()} - set(DEFAULT), key=lambda case: (case[0], str(case[1:]))
)


def _id(value: object) -> str:
    return value.label() if isinstance(value, Mesh) else str(value)


@pytest.mark.parametrize(
    ("name", "mesh", "dtype"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=_id
)
def test_derived_and_written_layouts_are_the_same(
    trainer_launcher: ForkLauncher, checkpoints: Path, tmp_path: Path, name: str, mesh: Mesh, dtype: str
) -> None:
    path = write_tiny(name, checkpoints, dtype)
    args = {
        "checkpoint": str(path), "mesh": mesh.to_dict(), "folder": str(tmp_path), "dtype": dtype, "tier": "cpu",
        "deadline_s": 120, "fixes": [], "within": [],
    }  # fmt: skip
    first, *_ = trainer_launcher.run(
        "verifier.runs.derived_layout_megatron:run", world_size=mesh.world_size, run_dir=tmp_path / "ranks", args=args,
        deadline_s=120,
    )  # fmt: skip
    derived, source = DerivedLayout.from_json(first), open_checkpoint(path)
    written = layout_of(source.config)
    assert written is not None
    assert derived.gaps == ()
    weights = numbered({name: meta.shape for name, meta in source.metas.items()})
    assert differences(derived, written, mesh, weights) == []
    assert derived.tied == ((written.tied or bool(copies_of(source.config))) and mesh.pp > 1)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["ranks"]
