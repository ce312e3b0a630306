"""A package that is left out is one that is not installed, for whoever asks in the usual ways.

What this does not exercise: the libraries that look for it, which tests/dist/test_without_flashinfer.py imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator

import pytest

from verifier.platform import leave_out


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[str]:
    """Name of a package that can be imported."""
    name = "package_to_leave_out"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for imported in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[imported]


@pytest.mark.parametrize("asked", ["", ".kernels"])
def test_its_import_fails_as_that_of_no_package(package, asked):
    leave_out(package)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(package + asked)


def test_it_is_not_found(package):
    assert importlib.util.find_spec(package) is not None
    leave_out(package)
    assert importlib.util.find_spec(package) is None


def test_one_that_was_imported_before_stays(package):
    before = importlib.import_module(package)
    leave_out(package)
    assert importlib.import_module(package) is before
