"""Whole outputs against whole files; `UPDATE_SNAPSHOTS=1 pytest tests/snapshots` rewrites them for review."""

import os
from pathlib import Path

import pytest

FILES = Path(__file__).parent / "files"


@pytest.fixture
def same_as_file():
    def compare(name: str, actual: str) -> None:
        file = FILES / name
        if os.environ.get("UPDATE_SNAPSHOTS"):
            file.write_text(actual, encoding="utf-8")
        assert file.exists(), f"there is no snapshot {file.name}: run with UPDATE_SNAPSHOTS=1 and read what it wrote"
        assert actual == file.read_text(encoding="utf-8")

    return compare
