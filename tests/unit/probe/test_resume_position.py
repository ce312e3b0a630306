"""A recorded loop that goes on from a checkpoint with its data from the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier import probe
from verifier.core import store
from verifier.report.report import report_of

ROWS, BATCH = [f"row-{number}" for number in range(6)], 2


def epochs(done: int) -> Iterator[str]:
    """Rows of two epochs behind the first ones."""
    return islice(chain(ROWS, ROWS), done, None)


def codes(folder: Path, resumes_at: int, done: int) -> list[str]:
    """Checks violated by a loop whose second process draws on from a row; the first one has trained some."""
    folder.mkdir()
    with probe.open(folder / "first", dtype="float32") as record:
        record.checkpoint_saved(done // BATCH, {"next": list(islice(epochs(done), BATCH))}, folder)
    with probe.open(folder / "second", dtype="float32") as record:
        record.checkpoint_loaded(done // BATCH, {"next": list(islice(epochs(resumes_at), BATCH))}, folder)
    report = report_of(store.read(folder / "second"), "")
    return [item.code for item in report.outcomes if item.finding is not None]


@pytest.mark.parametrize("done", [2, 4, 8])
def test_a_resume_that_begins_the_data_again_is_violated(done: int, tmp_path: Path) -> None:
    assert codes(tmp_path / "loop", 0, done) == ["CKP001"]


@pytest.mark.parametrize("done", [2, 4, 6, 8])
def test_a_resume_that_goes_on_holds_in_a_second_epoch_too(done: int, tmp_path: Path) -> None:
    assert codes(tmp_path / "loop", done, done) == []
