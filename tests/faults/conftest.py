"""Trials that the tests of a file share: launcher, engines and clean runs are started once."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from verifier.faults.trial import Trials


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    """Trials whose progress goes to stderr."""
    with Trials(lambda text: print(text, file=sys.stderr, flush=True)) as found:
        yield found
