"""Warm resources of a module, and one runner for its round trips."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verifier.launch.fork_launcher import ForkLauncher
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner


@pytest.fixture(scope="module")
def runner(trainer_launcher: ForkLauncher) -> Iterator[Runner]:
    """A runner on warm resources, which forks its ranks from the session's launcher."""
    with Resources(warm=True, launcher=trainer_launcher) as resources:
        yield Runner(resources, print)


@pytest.fixture(scope="module")
def resources() -> Iterator[Resources]:
    """Launcher, engines and oracle that the runs of a module share."""
    with Resources(warm=True) as found:
        yield found
