"""A command that is asked to end, or whose oracle ends or stops, says so and leaves nothing behind.

What this does not exercise: the same with Megatron's ranks and vLLM (tests/dist/test_fork_launcher.py and
test_engine_fork_server.py end those).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import alive, children
from tests.processes import said as said_of
from verifier.model.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
START_S = 60


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_tiny("qwen3", folder / "verifier", "bfloat16")
    return folder


@pytest.mark.parametrize(
    ("whom", "signum", "timeout_s", "code", "said"),
    [
        ("command", signal.SIGTERM, 60, 143, "ended by SIGTERM"),
        ("oracle", signal.SIGKILL, 60, 3, "the fp32 oracle's process ended "),
        pytest.param("oracle", signal.SIGSTOP, 12, 3, "the fp32 oracle did not answer ", marks=pytest.mark.slow),
    ],
)
def test_one_sentence_and_nothing_is_left(tmp_path, cache, whom, signum, timeout_s, code, said):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen(
        [sys.executable, "-m", "verifier", "noise", "--model", "tiny:qwen3", "--timeout", str(timeout_s)],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path, stdout=-1, stderr=-1, text=True,
    )  # fmt: skip
    until = time.monotonic() + START_S
    while not list(tmp_path.glob("verifier-engine-*/socket")):
        assert time.monotonic() < until
        time.sleep(0.02)
    (oracle,) = children(command.pid)
    os.kill(oracle if whom == "oracle" else command.pid, signum)
    out, err = command.communicate(timeout=timeout_s + 30)
    first, _, words = said_of(err).partition("\n")
    assert (command.returncode, out) == (code, "")
    assert first.startswith(f"verifier: {said}")
    assert not words or first.endswith("its last words:")
    assert not alive(oracle)
    assert list(tmp_path.glob("verifier-*")) == []
