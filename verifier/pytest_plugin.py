"""Pytest plugin of projects that use verifier: fixtures that judge, a marker for tests that need GPUs, its options.

A test that takes `verifier_trace`, `verifier_golden` or `verifier_roundtrip` fails by the report's text unless all
checks hold. Each test has its own folder, so pytest-xdist may run them side by side.

Every name begins with `verifier`, so a project with its own `--gpus`, `slow` or `h100` starts unchanged. Loading the
plugin imports nothing heavy; torch is imported when the first marked test is about to run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from verifier.probe import LoopRecorder

MARKER = "verifier_h100"
TRACE_FIXTURE = "verifier_trace"


class JudgedTraces:
    """Opener of the traces that a test's loop records, which are judged when the test has passed.

    Args:
        folder: for the traces.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[tuple[LoopRecorder, bool]] = []

    def __call__(self, *, oracle: bool = False, **options: Any) -> LoopRecorder:
        """A recorder; see `verifier.probe.open` for the options. With `oracle` transformers scores what it recorded."""
        from verifier import probe

        record = probe.open(self._folder / f"verifier-trace-{len(self._opened)}", **options)
        self._opened.append((record, oracle))
        return record

    def close(self) -> None:
        """Close what the test left open."""
        for record, _ in self._opened:
            record.close()

    def judge(self) -> None:
        """Close, and fail by the first report that does not hold."""
        from verifier.cli.judge import failure_of_trace

        self.close()
        for record, oracle in self._opened:
            if said := failure_of_trace(record.path, oracle=oracle):
                pytest.fail(said, pytrace=False)


@pytest.fixture
def verifier_trace(tmp_path: Path) -> Iterator[JudgedTraces]:
    """Opens a trace for a loop of one's own, by the options of `verifier.probe.open`; judged when the test has run."""
    traces = JudgedTraces(tmp_path)
    yield traces
    traces.close()


@pytest.fixture
def verifier_golden(tmp_path: Path) -> Callable[..., Path]:
    """Runs `verifier golden` with knobs such as "model=tiny:qwen3" and "mesh.tp=2"; returns the trace if it holds."""
    return _runs("golden", tmp_path)


@pytest.fixture
def verifier_roundtrip(tmp_path: Path) -> Callable[..., Path]:
    """Runs `verifier roundtrip` with knobs, as `verifier_golden` does."""
    return _runs("roundtrip", tmp_path)


def _runs(command: str, folder: Path) -> Callable[..., Path]:
    count = 0

    def run(*knobs: str) -> Path:
        nonlocal count
        from verifier.cli.judge import failure_of_run

        count += 1
        trace = folder / f"verifier-{command}-{count}"
        if said := failure_of_run(command, knobs, trace):
            pytest.fail(said, pytrace=False)
        return trace

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Judge the traces of a test that has passed so far, so that it fails as a test does."""
    yield
    traces = getattr(item, "funcargs", {}).get(TRACE_FIXTURE)
    if isinstance(traces, JudgedTraces):
        traces.judge()


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
