"""The plugin, in a pytest of its own."""

import os
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT

TESTS = """
import pytest

@pytest.mark.h100(gpus=64)
def test_wants_64_gpus():
    assert True

def test_plain():
    assert True

@pytest.mark.xfail(reason="known")
def test_expected_to_fail():
    assert False
"""


FOR_HOSTS = """
import pytest

@pytest.mark.h100(gpus=2)
def test_for_2(): ...

@pytest.mark.h100(gpus=4)
def test_for_4(): ...

@pytest.mark.h100(gpus=4, least=2)
def test_for_4_shares_2(): ...

@pytest.mark.h100(gpus=4, least=3)
def test_for_4_shares_3(): ...
"""


@pytest.fixture
def run_pytest(tmp_path):
    (tmp_path / "test_inner.py").write_text(TESTS)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "verifier.pytest_plugin", "-rs", "--strict-markers", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return run


def test_a_missing_gpu_is_named_in_the_skip(run_pytest):
    done = run_pytest()
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped, 1 xfailed" in done.stdout
    assert "needs 64 GPU(s) of compute capability 9.0: torch sees" in done.stdout


def test_no_skip_turns_the_skip_into_a_failure(run_pytest):
    done = run_pytest("--no-skip")
    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 xfailed, 1 error" in done.stdout
    assert "did not run, and --no-skip is on: needs 64 GPU(s) of compute capability 9.0" in done.stdout


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), ["test_for_2", "test_for_4", "test_for_4_shares_2", "test_for_4_shares_3"]),
        (("--gpus", "2"), ["test_for_2"]),
        (("--gpus", "2", "--share-gpus"), ["test_for_4_shares_2"]),
        (("--gpus", "3", "--share-gpus"), ["test_for_4_shares_2", "test_for_4_shares_3"]),
        (("--gpus", "4", "--share-gpus"), []),
    ],
    ids=str,
)
def test_what_a_host_can_run_is_left(run_pytest, tmp_path, options, left):
    (tmp_path / "test_inner.py").write_text(FOR_HOSTS)
    done = run_pytest("--collect-only", "-q", *options)
    found = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == left
