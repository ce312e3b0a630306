"""The kernels that a GPU computes log-probabilities with, interpreted on the host.

What this does not exercise: the compiled kernels (tests/h100/test_train_speed.py).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = {"interpret_logprob_kernel.py": "40 cases agree\n", "interpret_logprob_ranks.py": "3 vocabularies agree\n"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_kernels_agree_with_torch_operations(name: str) -> None:
    """Values and gradients: columns of -inf, rows that predict nothing, a temperature; two ranks."""
    script = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == SCRIPTS[name]
