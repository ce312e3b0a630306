"""vLLM's reload keeps views of what it loads until a layer is complete; `copy_kept_views` copies them.

CUDA IPC lets the engine read the trainer's own buffer, which is filled again. What this does not exercise: a GPU, and
the loaders of vLLM's own layers (tests/h100/test_roundtrip_gpu.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def said() -> dict[str, list[list[int]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contracts.held_views"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_views_are_kept_until_the_layer_is_complete(said):
    held, right = said["kept"]
    assert held == [1, 2, -3]
    assert right == [False, False, True]


def test_what_was_let_go_is_loaded_right(said):
    held, right = said["let go"]
    assert held == [0, 0, 0]
    assert right == [True, True, True]
