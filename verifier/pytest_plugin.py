"""The pytest plugin: markers, and skips that say what is missing and that GPU runs turn into failures.

Loading it imports nothing heavy; torch is asked for devices when the first test that needs some is about to run.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-skip`: every test has to have run. `--gpus`, `--share-gpus`: of the h100 tests, which can."""
    parser.addoption("--no-skip", action="store_true", help="a skipped test fails: green means that everything ran")
    parser.addoption("--gpus", type=int, help="leave out the h100 tests that need more GPUs than this")
    parser.addoption(
        "--share-gpus", action="store_true", help="with --gpus: only those left out whose ranks can share that many"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the `h100` tests for which `--gpus` says that there are too few, or with `--share-gpus`, enough."""
    limit, share = config.getoption("gpus"), config.getoption("share_gpus")
    if limit is None:
        return
    asked = {item: wanted_gpus(marker) for item in items if (marker := item.get_closest_marker("h100"))}
    other = [item for item, (gpus, least) in asked.items() if not (least <= limit < gpus if share else gpus <= limit)]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


def wanted_gpus(marker: pytest.Mark) -> tuple[int, int]:
    """How many GPUs an `h100` test is for, and how many are enough where ranks share them."""
    gpus = marker.kwargs.get("gpus", 1)
    return gpus, marker.kwargs.get("least", gpus)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", "slow: takes minutes; left out unless asked for by `-m slow`")
    config.addinivalue_line(
        "markers",
        "h100(gpus=1, least=gpus): needs that many GPUs of compute capability 9.0; with --share-gpus, `least`",
    )
    config.addinivalue_line("markers", "timed: an h100 test that is to have the host for itself")
    config.addinivalue_line("markers", "own_process: an h100 test that takes longer than the rest of its file")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip an `h100` test where its devices are missing, naming them."""
    marker = item.get_closest_marker("h100")
    if marker is not None:
        gpus, least = wanted_gpus(marker)
        missing = missing_gpus(least if item.config.getoption("share_gpus") else gpus)
        if missing:
            pytest.skip(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under `--no-skip`, a skip is a failure with the skip's reason. An expected failure stays what it is."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("no_skip"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} did not run, and --no-skip is on: {reason.removeprefix('Skipped: ')}"
    return report


def missing_gpus(needed: int) -> str:
    """What is missing for a test that needs GPUs of compute capability 9.0; empty when all are there."""
    try:
        import torch
    except ImportError:
        return f"needs {needed} GPU(s) of compute capability 9.0, and torch to ask for them: torch is not installed"
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    fitting = sum(capability == (9, 0) for capability in found)
    if fitting >= needed:
        return ""
    seen = f"torch sees {len(found)} GPU(s), {fitting} of them such" if found else "torch sees no GPU"
    return f"needs {needed} GPU(s) of compute capability 9.0: {seen}"
