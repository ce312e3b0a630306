"""Pytest plugin of projects that use verifier: a marker for tests that need GPUs, and options that say how strictly.

Every name begins with `verifier`, so a project with its own `--gpus`, `slow` or `h100` starts unchanged. Loading the
plugin imports nothing heavy; torch is imported when the first marked test is about to run.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

MARKER = "verifier_h100"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--verifier-gpus` and `--verifier-no-skip`."""
    group = parser.getgroup("verifier", "tests that need GPUs")
    group.addoption(
        "--verifier-gpus", type=int, metavar="N", help=f"deselect {MARKER} tests that need more GPUs than N"
    )
    group.addoption("--verifier-no-skip", action="store_true", help=f"a skipped {MARKER} test fails")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", f"{MARKER}(gpus=1): needs that many GPUs of compute capability 9.0")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need more GPUs than `--verifier-gpus` allows."""
    limit = config.getoption("verifier_gpus")
    if limit is not None:
        deselect(config, items, [item for item in items if needed_gpus(item) > limit])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test whose GPUs are missing, and name them."""
    skip_without_gpus(needed_gpus(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under `--verifier-no-skip`, turn the skip of a marked test into a failure."""
    report = yield
    if item.get_closest_marker(MARKER) is not None and item.config.getoption("verifier_no_skip"):
        fail_skipped(item, report, "--verifier-no-skip")
    return report


def needed_gpus(item: pytest.Item) -> int:
    """Number of GPUs that the test's marker asks for, 0 without the marker."""
    marker = item.get_closest_marker(MARKER)
    return 0 if marker is None else int(marker.kwargs.get("gpus", 1))


def deselect(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    """Remove the other tests from the collection and report them to pytest as deselected."""
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def fail_skipped(item: pytest.Item, report: pytest.TestReport, option: str) -> None:
    """Turn a skip into a failure with the skip's reason; an expected failure stays what it is."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} did not run, and {option} is on: {reason.removeprefix('Skipped: ')}"


def skip_without_gpus(needed: int) -> None:
    """Skip the running test, naming what is missing, unless that many GPUs of compute capability 9.0 are there."""
    if not needed:
        return
    wanted = f"needs {needed} GPU(s) of compute capability 9.0"
    try:
        import torch
    except ImportError:
        pytest.skip(f"{wanted}, and torch to ask for them: torch is not installed")
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    fitting = found.count((9, 0))
    if fitting < needed:
        seen = f"torch sees {len(found)} GPU(s), {fitting} of them such" if found else "torch sees no GPU"
        pytest.skip(f"{wanted}: {seen}")
