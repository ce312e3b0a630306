"""Modules imported again in a child: the new code, and what took it from there; or a refusal, for a new process."""

from __future__ import annotations

import importlib
import sys

import pytest

from verifier.campaign.watch.reloading import reload, to_reload

FILES = {
    "__init__": "from bridged.llama import Bridge\nfrom bridged.registry import REGISTRY",
    "registry": "REGISTRY = {}",
    "base": "class Base:\n    kind = 'old'",
    "llama": (
        "from bridged.base import Base\nfrom bridged.registry import REGISTRY\n"
        "class Bridge(Base):\n    rows = 'old'\nREGISTRY['llama'] = Bridge"
    ),
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "bridged"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.import_module("bridged")
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "bridged"]:
        del sys.modules[name]


def test_a_changed_mapping_registers_anew_and_its_package_shows_it(package):
    import bridged

    (package / "llama.py").write_text(FILES["llama"].replace("'old'", "'new'"))
    reload([str(package / "llama.py")])
    assert bridged.REGISTRY["llama"].rows == bridged.Bridge.rows == "new"


def test_who_took_a_class_from_a_changed_module_is_imported_after_it(package):
    import bridged

    (package / "base.py").write_text(FILES["base"].replace("'old'", "'new'"))
    reload([str(package / "base.py")])
    assert bridged.REGISTRY["llama"].kind == "new"


def test_files_that_nobody_loaded_change_nothing(package):
    assert to_reload([str(package / "other.py")]) == []


def test_a_package_needs_a_new_process(package):
    assert to_reload([str(package / "__init__.py")]) is None


def test_a_patched_module_needs_a_new_process(package):
    import bridged.llama

    bridged.llama.Bridge.call = reload
    assert to_reload([str(package / "llama.py")]) is None


def test_our_own_modules_need_a_new_process():
    assert to_reload([sys.modules["verifier.campaign.watch.reloading"].__file__]) is None


def test_what_many_depend_on_needs_a_new_process(package):
    for number in range(20):
        (package / f"user{number}.py").write_text("from bridged.base import Base")
        importlib.import_module(f"bridged.user{number}")
    assert to_reload([str(package / "base.py")]) is None
