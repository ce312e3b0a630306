"""One process with Megatron loaded serves every test that needs trainer ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from verifier.launch.fork_launcher import ForkLauncher

HERE = Path(__file__).parent
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
"""Torch 2.11's flight recorder, one per process, crashes when gloo groups on several threads write to it, as they do in
tests that have a rank on each."""


@pytest.fixture(scope="session")
def trainer_launcher():
    """Forks trainer ranks of the CPU tier; rank functions are found in `dist` and `contracts`."""
    sys.path[:0] = [str(HERE / "dist"), str(HERE / "contracts")]
    with ForkLauncher(preload="trainer_functions:preload") as launcher:
        yield launcher


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directory in which tiny checkpoints are kept for the session."""
    return tmp_path_factory.mktemp("checkpoints")
