"""The plugin that other projects get, in a pytest of its own.

This repository's own options: tests/meta/test_tiers.py.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT

MARKED = """
import pytest

@pytest.mark.verifier_h100(gpus=64)
def test_wants_64_gpus():
    assert True

def test_plain():
    assert True

@pytest.mark.verifier_h100
@pytest.mark.xfail(reason="known", run=False)
def test_expected_to_fail():
    assert False
"""
TORCH = """
class cuda:
    device_count = staticmethod(lambda: 3)
    get_device_capability = staticmethod(lambda index: (9, 0) if index else (8, 0))
"""
"""Stands for torch on a host of three GPUs, two of compute capability 9.0; torch itself takes seconds to load."""
FOREIGN_CONFTEST = """
def pytest_addoption(parser):
    for name in ("--gpus", "--no-skip", "--share-gpus"):
        parser.addoption(name, default="theirs")

def pytest_configure(config):
    for name in ("slow", "timed", "quick", "own_process", "h100(gpus)"):
        config.addinivalue_line("markers", f"{name}: theirs")
"""
FOREIGN_TESTS = """
import pytest

@pytest.mark.h100(gpus=64)
@pytest.mark.slow
@pytest.mark.timed
def test_theirs(request):
    assert request.config.getoption("gpus") == "2"

def test_skips():
    pytest.skip("theirs")
"""


def run_pytest(folder, *arguments: str, plugin: bool = True) -> str:
    """Output of a pytest in a folder without configuration; other installed plugins stay out, for speed."""
    # An installed plugin is found by itself; naming it is for a checkout that is only on the path.
    ours = "verifier.pytest_plugin" if plugin else "no:verifier.pytest_plugin"
    others = ("no:anyio", "no:hydra_pytest", "no:hypothesispytest", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--strict-markers", "--strict-config", f"--rootdir={folder}"]
        + [word for name in (ours, *others) for word in ("-p", name)]
        + list(arguments),
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


@pytest.fixture
def marked(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_inner.py").write_text(MARKED)
    return tmp_path


def test_a_missing_gpu_is_named_in_the_skip(marked):
    said = run_pytest(marked)
    assert "1 passed, 1 skipped, 1 xfailed" in said
    assert "needs 64 GPU(s) of compute capability 9.0: torch sees 3 GPU(s), 2 of them such" in said
    assert said.endswith("exit code 0")


def test_no_skip_turns_the_skip_of_a_marked_test_into_a_failure(marked):
    (marked / "test_inner.py").write_text(MARKED + "\ndef test_skips():\n    pytest.skip('theirs')\n")
    said = run_pytest(marked, "--verifier-no-skip")
    assert "1 passed, 1 skipped, 1 xfailed, 1 error" in said
    assert "did not run, and --verifier-no-skip is on: needs 64 GPU(s) of compute capability 9.0" in said
    assert said.endswith("exit code 1")


def test_tests_for_more_gpus_are_left_out(marked):
    assert "1 passed, 1 deselected, 1 xfailed" in run_pytest(marked, "--verifier-gpus", "63")


def test_a_marked_test_runs_where_its_gpus_are(marked):
    (marked / "test_inner.py").write_text(MARKED.replace("gpus=64", "gpus=2"))
    assert "2 passed, 1 xfailed" in run_pytest(marked)


def test_a_project_with_options_and_markers_of_our_names_starts(tmp_path):
    """Its own `--gpus`, `h100` and `slow` mean what it says, and its skips stay skips."""
    (tmp_path / "conftest.py").write_text(FOREIGN_CONFTEST)
    (tmp_path / "test_inner.py").write_text(FOREIGN_TESTS)
    said = run_pytest(tmp_path, "--gpus", "2", "--verifier-no-skip", "-m", "slow or not slow")
    assert "1 passed, 1 skipped" in said
    assert said.endswith("exit code 0")


@pytest.mark.parametrize(
    ("listing", "pattern"),
    [("--help", r"^  (-[-\w]+)"), ("--markers", r"^@pytest\.mark\.(\w+)"), ("--fixtures", r"^(\w+)(?: \[| --)")],
)
def test_every_installed_name_begins_with_verifier(tmp_path, listing, pattern):
    """Options, markers and fixtures of a pytest with the plugin, less those of one without."""
    listed = [
        set(re.findall(pattern, run_pytest(tmp_path, listing, plugin=plugin), re.MULTILINE)) for plugin in (True, False)
    ]
    added = listed[0] - listed[1]
    assert listed[1]
    assert [name for name in added if not name.lstrip("-").startswith("verifier")] == []
    assert added


JUDGED = """
import torch

def record(opened, *, swapped):
    from verifier import probe
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    with opened as record:
        record.weights_exported(tensors, 1)
        with probe.attach(record.path) as engine:
            engine.weights_received(tensors if not swapped else {"a": tensors["b"], "b": tensors["a"]}, 1)
        record.weights_sent(1)

def test_holds(verifier_trace):
    record(verifier_trace(), swapped=False)

def test_swaps(verifier_trace):
    record(verifier_trace(), swapped=True)

def test_records_nothing(verifier_trace):
    verifier_trace()

def test_breaks(verifier_trace):
    record(verifier_trace(), swapped=True)
    raise RuntimeError("theirs")

def test_asks_for_nonsense(verifier_golden):
    verifier_golden("model=tiny:none-such")
"""


@pytest.mark.parametrize(
    "workers",
    [pytest.param((), id="alone"), pytest.param(("-p", "xdist", "-n", "2"), id="xdist", marks=pytest.mark.slow)],
)
def test_a_trace_that_does_not_hold_fails_by_its_report(tmp_path, workers):
    (tmp_path / "test_inner.py").write_text(JUDGED)
    said = run_pytest(tmp_path, *workers)
    assert "4 failed, 1 passed" in said
    assert "`a` holds in what engine rank 0 received what `b` should hold" in said
    assert "RuntimeError: theirs" in said
    assert "`verifier golden model=tiny:none-such` ended:" in said
    assert "inconclusive" in said
