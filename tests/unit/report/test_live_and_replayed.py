"""A trace judged from memory and the same trace read back from disk give the same text, to the byte."""

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import ARRAYS, BROKEN, MANIFEST, arrays_of, clean
from verifier.core import store
from verifier.core.check import REGISTRY
from verifier.core.manifest import Facts
from verifier.core.trace import Trace
from verifier.report import render_junit, render_text, report_of

RUN = replace(
    MANIFEST, layout="a row", facts=Facts(judges_gradients=True), config={**MANIFEST.config, "update": "step"}
)
"""Of a run whose shards and gradients are judged."""


def stored(path, evidence) -> Trace:
    """Written by one recorder per role and rank, as a run does, then read back."""
    store.create(path, RUN)
    recorders = {}
    for item in evidence:
        key = (item.role, item.rank)
        if key not in recorders:
            recorders[key] = store.Recorder(path, *key)
        recorders[key].emit(item, arrays_of(item))
    for recorder in recorders.values():
        recorder.close()
    store.complete(path, RUN)
    return store.read(path)


@pytest.mark.parametrize("code", [None, *BROKEN])
def test_same_text(code, tmp_path):
    evidence = clean() if code is None else BROKEN[code]
    live = report_of(Trace(RUN, evidence, ARRAYS.__getitem__), "t", only_codes=[*REGISTRY])
    replayed = report_of(stored(tmp_path / "trace", evidence), "t", only_codes=[*REGISTRY])
    assert render_text(live) == render_text(replayed)
    assert live.exit_code == replayed.exit_code == (0 if code is None else 1)
    assert render_junit(live) == render_junit(replayed)
