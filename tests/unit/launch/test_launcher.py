"""The parent's side stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verifier.errors import ContractError, UsageError
from verifier.launch.child import resolve
from verifier.launch.fork_launcher import ForkLauncher


def test_importing_it_loads_neither_torch_nor_numpy():
    script = "import sys; sys.path.insert(0, sys.argv[1]); import verifier.launch.fork_launcher; print(*sys.modules)"
    root = str(Path(__file__).parents[3])
    run = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, check=True, timeout=60)
    assert {"torch", "numpy", "ray", "vllm", "megatron"}.isdisjoint(run.stdout.split())


def test_outside_of_its_with_block_it_refuses():
    with pytest.raises(ContractError, match="use it in a with block"):
        ForkLauncher().pid  # noqa: B018 - a property that refuses


def test_resolve():
    assert resolve("json:dumps")([1]) == "[1]"
    for name in ("json", "json:", ":dumps"):
        with pytest.raises(UsageError, match=r"write package\.module:function"):
            resolve(name)
    with pytest.raises(UsageError, match="`json` has no function `absentee`"):
        resolve("json:absentee")
