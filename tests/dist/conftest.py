"""Warm resources of a worker's runs, and one runner for its round trips."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verifier.launch.fork_launcher import ForkLauncher
from verifier.runs.resources import Resources
from verifier.runs.runner import Runner


@pytest.fixture(scope="session")
def warm_resources(trainer_launcher: ForkLauncher) -> Iterator[Resources]:
    """The session's launcher; a fork server of engines and an oracle that start once for all modules of a worker."""
    with Resources(warm=True, launcher=trainer_launcher) as found:
        yield found


@pytest.fixture(scope="module")
def resources(warm_resources: Resources) -> Iterator[Resources]:
    """Warm resources whose engines end with the module."""
    yield warm_resources
    warm_resources.stop_engines()


@pytest.fixture(scope="module")
def runner(resources: Resources) -> Runner:
    """A runner on warm resources."""
    return Runner(resources, print)
