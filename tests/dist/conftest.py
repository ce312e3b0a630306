"""One process with Megatron loaded serves every test here that needs trainer ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verifier.launch.zygote import Zygote


@pytest.fixture(scope="session")
def trainer_zygote():
    """Forks trainer ranks of the CPU tier."""
    sys.path.insert(0, str(Path(__file__).parent))
    with Zygote(preload="trainer_functions:preload") as zygote:
        yield zygote


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directory in which tiny checkpoints are kept for the session."""
    return tmp_path_factory.mktemp("checkpoints")
