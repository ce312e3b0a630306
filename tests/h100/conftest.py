"""One runner for all GPU tests, and what they measured, written where `ci/gpu` asks for it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.h100 import turn

RESULTS = "VERIFIER_GPU_RESULTS"
"""Environment variable: the file that gets the results."""
PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep how a test went, for its rows."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(scope="session")
def runner() -> Iterator[Any]:
    from verifier.runs.resources import Resources
    from verifier.runs.runner import Runner

    began = time.monotonic()
    with Resources(warm=True) as resources:
        yield Runner(resources, lambda text: print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True))


@pytest.fixture(scope="session")
def rows() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    yield found
    if os.environ.get(RESULTS):
        Path(os.environ[RESULTS]).write_text(json.dumps({**machine(), "rows": found}, indent=1) + "\n")


@pytest.fixture(scope="session")
def its_turn() -> Iterator[None]:
    """From here on nothing else uses the host, until this process ends; ask for it last, after what has to start."""
    with turn.alone():
        yield


@pytest.fixture
def measured(rows: list[dict[str, Any]], request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Keep what a test measured, under its name, and whether it passed in the end."""
    mine: list[dict[str, Any]] = []

    def keep(**values: Any) -> None:
        mine.append({"test": request.node.name, **values})
        print(mine[-1], flush=True)

    yield keep
    rows += ({**row, "passed": request.node.stash.get(PASSED, False)} for row in mine)


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    import torch

    from verifier.platform.provenance import PINS, installed

    return {
        "machine": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "versions": {name: found for name in PINS if (found := installed(name)) is not None},
        "command": "ci/gpu " + " ".join(sys.argv[1:]),
    }
