"""Plugins: what they register is found by name, and every way in which one is wrong is refused in a sentence."""

import subprocess
import sys

import pytest
import torch

from tests.meta.sources import ROOT
from verifier.algorithms import advantages, losses, registry
from verifier.algorithms.registry import LossOptions
from verifier.errors import UsageError

PLUGIN = """
from verifier.algorithms.registry import advantage, loss, reward

@loss("plain")
def plain(inputs, options):
    return -inputs.advantage_T * inputs.current_T

@advantage("raw")
def raw(rewards_N, groups, token_counts_N):
    return rewards_N

@reward("always")
def always(*given):
    return 1.0
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Leave the registry and the imported modules as they were."""
    monkeypatch.setattr(registry, "_REGISTERED", {kind: dict(own) for kind, own in registry._REGISTERED.items()})
    yield
    for name in ("mine", "bad", "first", "second"):
        sys.modules.pop(name, None)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_what_a_plugin_registers_is_used(plugin):
    registry.load_plugins([plugin("mine", PLUGIN)])
    registry.load_plugins(["mine"])
    assert registry.find("reward", "always")() == 1
    assert advantages.advantages([3.0], ["a"], "raw").tolist() == [3]
    row = torch.tensor([-2.0, float("nan")])
    inputs = losses.LossInputs(
        current_T=row, entropy_T=row, divisor_T=row, advantage_T=torch.tensor([2.0, 1.0]), reference_T=None,
        mask_T=torch.tensor([True, False]), sequence_mean=lambda value_T: value_T,
    )  # fmt: skip
    assert losses.token_loss("plain", inputs, LossOptions()).tolist() == [4, 0]


def test_built_in_names_are_those_that_the_modules_register():
    for kind in ("loss", "advantage"):
        assert {name: own.__module__ for name, own in registry._REGISTERED[kind].items()} == registry.BUILT_IN[kind]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "plugin `bad` raises ZeroDivisionError when it is imported: division by zero"),
        ("import absent_library", "plugin `bad` raises ModuleNotFoundError .* No module named 'absent_library'"),
        ("def", "plugin `bad` raises SyntaxError"),
        (
            PLUGIN.replace('"raw"', '"grpo"'),
            "plugin `bad`: advantage `grpo` of `bad` is taken by `verifier.algorithms.adv",
        ),
        (
            PLUGIN.replace('"plain"', '"gspo"'),
            "plugin `bad`: loss `gspo` of `bad` is taken by `verifier.algorithms.losses`",
        ),
    ],
)
def test_a_plugin_that_is_wrong_is_named_and_registers_nothing(plugin, text, message):
    known = [registry.names(kind) for kind in ("loss", "advantage", "reward")]
    with pytest.raises(UsageError, match=message):
        registry.load_plugins([plugin("bad", text)])
    assert [registry.names(kind) for kind in ("loss", "advantage", "reward")] == known


@pytest.mark.parametrize("module", ["absent_plugin", "absent_package.part"])
def test_a_missing_plugin_is_named(module):
    with pytest.raises(
        UsageError, match=f"plugin `{module}` is not found: install it, or add its folder to PYTHONPATH"
    ):
        registry.load_plugins([module])


def test_two_plugins_with_one_name_are_refused(plugin):
    with pytest.raises(UsageError, match="plugin `second`: loss `plain` of `second` is taken by `first`"):
        registry.load_plugins([plugin("first", PLUGIN), plugin("second", PLUGIN)])


def test_an_estimator_with_another_shape_is_refused(plugin):
    registry.load_plugins([plugin("mine", PLUGIN.replace("return rewards_N", "return rewards_N[:1]"))])
    with pytest.raises(UsageError, match=r"`raw` must give 2 finite numbers.* has shape \[1\] and 1 finite"):
        advantages.advantages([3.0, 1.0], ["a", "b"], "raw")


def test_an_unknown_reward_says_how_to_register_one():
    with pytest.raises(UsageError, match=r"reward `x` is unknown .*: list the module that registers it in `plugins`"):
        registry.find("reward", "x")


def test_a_config_is_checked_without_torch():
    program = """
import sys
from verifier.algorithms.registry import LossOptions, check_loss
from verifier.algorithms.off_policy import CorrectionOptions
from verifier.algorithms import advantages, aggregation, filters, kl
check_loss("gspo", LossOptions(kl_weight=0.1), has_reference=True)
CorrectionOptions(weight="token")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)
