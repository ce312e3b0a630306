"""One bug between trainer and engine, with vLLM: clean, caught in its own stage, and healed.

What this does not exercise: every other bug (`verifier faults matrix`); those of the token path are in
test_token_faults.py.
"""

from __future__ import annotations

import sys

import pytest

from verifier.faults.catalog import CATALOG
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials


@pytest.mark.slow
def test_fault_is_caught_where_it_sits() -> None:
    with Trials(lambda text: print(text, file=sys.stderr, flush=True)) as trials:
        result = trials.trial(CATALOG["router-rounded-on-the-wire"])
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)
