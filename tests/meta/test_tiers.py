"""Tiers and options of this repository's own tests."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import tiers
from tests.meta.sources import ROOT

FOR_HOSTS = """
import pytest

@pytest.mark.h100(gpus=2)
def test_for_2(): ...

@pytest.mark.h100(gpus=64, least=32)
def test_for_64_shares_32(): ...

def test_skips():
    pytest.skip("for a reason")
"""


def run_pytest(folder, *arguments: str) -> str:
    (folder / "test_inner.py").write_text(FOR_HOSTS)
    (folder / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 0)\n")
    plugins = ("tests.tiers", "no:anyio", "no:hydra_pytest", "no:hypothesispytest", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--strict-markers", *arguments]
        + [word for name in plugins for word in ("-p", name)],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout


def test_no_skip_turns_every_skip_into_a_failure(tmp_path):
    said = run_pytest(tmp_path, "--no-skip", "-m", "not h100 or h100(gpus=64)")
    assert "1 failed, 1 deselected, 1 error" in said
    assert "test_skips did not run, and --no-skip is on: for a reason" in said
    assert "test_for_64_shares_32 did not run, and --no-skip is on: needs 64 GPU(s) of compute capability 9.0" in said


def test_a_missing_gpu_is_named_in_the_skip(tmp_path):
    said = run_pytest(tmp_path, "-m", "h100(gpus=64)")
    assert "1 skipped, 2 deselected" in said
    assert "needs 64 GPU(s) of compute capability 9.0: torch sees no GPU" in said


@pytest.mark.parametrize(
    ("limit", "share", "left"),
    [(2, False, "a"), (4, False, "abcd"), (2, True, "c"), (3, True, "cd"), (4, True, "")],
)
def test_tests_are_selected_by_number_of_gpus(limit, share, left):
    asked = {"a": {"gpus": 2}, "b": {"gpus": 4}, "c": {"gpus": 4, "least": 2}, "d": {"gpus": 4, "least": 3}}
    items = {name: SimpleNamespace(get_closest_marker=lambda _, k=kwargs: SimpleNamespace(kwargs=k))
             for name, kwargs in asked.items()}  # fmt: skip
    assert "".join(name for name, item in items.items() if tiers.fits(item, limit, share)) == left


def test_exceptions_of_the_tiers_exist():
    for name in (*tiers.NOT_QUICK, *(row.partition("[")[0] for row in tiers.SLOW_ROWS)):
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text(), name
    assert [name for name in tiers.QUICK_FOLDERS if not (ROOT / "tests" / name).is_dir()] == []
