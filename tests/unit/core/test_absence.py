"""Absence never passes: what one rank, engine, version or update recorded of a kind is taken away, and nothing holds.

What this does not exercise: one of several records that a rank has of a kind and a version, such as one tensor of many,
where no check has a second side for it.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.unit.probe import test_probe
from verifier import probe
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.reader import read
from verifier.core.record import ArrayRecord, Record, kind_of
from verifier.core.trace import Arrays, Trace

sync: Any = test_probe.sync
train: Any = test_probe.train
RECORDED = Path(__file__).with_name("recorded")
"""A step of GRPO on dp2 pp2 with two updates that transformers computes too, the export of that run, and a round trip
of two cycles on tp2, all with the hf engine."""
Place = tuple[type[Record], str, int, int, int | None]


def place_of(item: Record) -> Place:
    """Kind, recorder, version and update."""
    return type(item), *item.party, item.version, item.update_number


def loop(path: Path) -> None:
    """Two steps of a recorded loop, and the syncs before, between and after them."""
    with probe.open(path, dtype="float32") as record:
        sync(record, 0)
        for step in (1, 2):
            train(record, step)
            sync(record, step)


def _kept(trace: Trace, keys: Mapping[str, ArrayRecord]) -> Arrays:
    return cache(lambda key: trace.arrays(keys[key]))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trace]:
    """Clean traces, whose arrays are read once."""
    folder = tmp_path_factory.mktemp("recorded")
    for file in RECORDED.glob("*.tar.xz"):
        with tarfile.open(file) as archive:
            archive.extractall(folder / file.name.partition(".")[0], filter="data")
    loop(folder / "loop")
    found = {}
    for path in folder.iterdir():
        trace = read(path)
        keys = {item.array: item for item in trace.records if isinstance(item, ArrayRecord)}
        found[path.name] = Trace(trace.manifest, trace.records, _kept(trace, keys))
    return found


@pytest.mark.parametrize(("name", "least"), [("step", 150), ("export", 20), ("roundtrip", 120), ("loop", 18)])
def test_nothing_that_a_clean_run_recorded_can_be_taken_away(
    traces: Mapping[str, Trace], name: str, least: int
) -> None:
    whole = traces[name]
    checks = [item for item in REGISTRY.values() if item.applies(whole.manifest) is None]
    assert {item.code: run_check(item, whole).verdict for item in checks} == dict.fromkeys(
        (item.code for item in checks), Verdict.HOLDS
    )
    places = {place_of(item) for item in whole.records}
    if name == "loop":  # without an oracle, some of its evidence is not judged, which the report says
        places = {place for place in places if any(place[0] in item.needs for item in checks)}
    assert len(places) >= least
    passed = []
    for place in places:
        kind = place[0]
        rest = Trace(whole.manifest, [item for item in whole.records if place_of(item) != place], whole.arrays_by_key)
        soon = [item for item in checks if kind in item.needs]  # those that need it
        if all(run_check(item, rest).verdict is Verdict.HOLDS for item in [*soon, *checks]):
            passed.append((kind_of(kind), *place[1:]))
    assert sorted(passed, key=str) == []


def test_the_report_names_what_is_missing(traces: Mapping[str, Trace]) -> None:
    whole = traces["step"]
    rest = [item for item in whole.records if place_of(item)[1:] != ("trainer", 3, 2, 4)]
    outcome = run_check(REGISTRY["TRN002"], Trace(whole.manifest, rest, whole.arrays_by_key))
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert outcome.not_recorded == ("train/done of trainer rank 3 in update 4",)
