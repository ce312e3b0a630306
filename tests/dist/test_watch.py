"""`verifier golden --watch`: a wrong row shows in the next round, in checks and on ranks, and nothing is left.

What this does not exercise: `roundtrip --watch`, whose times docs/contributing.md has; edits of megatron-bridge.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import alive
from verifier.launch.child import descendants
from verifier.model.tiny import write_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
ROW = "self_attn.k_proj.weight self_attn.v_proj.weight"
SWAPPED = "self_attn.v_proj.weight self_attn.k_proj.weight"
WAITING = "watch: waiting for a change\n"


def rounds(output: Path, number: int) -> str:
    """What was printed between two waits, of which this is the last."""
    until = time.monotonic() + DEADLINE_S
    while (text := output.read_text()).count(WAITING) < number:
        assert time.monotonic() < until, text
        time.sleep(0.05)
    return text.split(WAITING)[number - 1]


def test_a_row_is_broken_and_mended(tmp_path):
    shutil.copytree(ROOT / "verifier", tmp_path / "verifier", ignore=shutil.ignore_patterns("__pycache__"))
    model = write_tiny("qwen3", tmp_path / "cache")
    scratch, output = tmp_path / "scratch", tmp_path / "output"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": ""}
    with output.open("w") as stream:
        command = subprocess.Popen(
            [sys.executable, "-m", "verifier", "golden", "--model", str(model), "--watch", "-q"],
            env=environment, cwd=tmp_path, stdout=stream, stderr=stream,
        )  # fmt: skip
    try:
        assert "holds: " in rounds(output, 1)
        names, session = tmp_path / "verifier/export/names.py", tmp_path / "verifier/runs/session_megatron.py"
        good, ranks = names.read_text(), session.read_text()

        names.write_text(good.replace(ROW, SWAPPED))
        assert "newly violated: WGT001" in rounds(output, 2)
        names.write_text(good + "\n)\n")
        assert "Python cannot read it" in rounds(output, 3)
        names.write_text(good)
        assert "newly holds: WGT001" in rounds(output, 4)

        session.write_text(ranks + '\nraise RuntimeError("said by ranks")\n')
        assert "said by ranks" in (broken := rounds(output, 5))
        assert "newly inconclusive: WGT001" in broken
        session.write_text(ranks)
        assert "newly holds: WGT001" in rounds(output, 6)

        (model / "config.json").touch()
        assert "`config.json` changed" in rounds(output, 7)

        left = descendants(command.pid)
        assert left
        command.send_signal(signal.SIGTERM)
        assert command.wait(30) == 128 + signal.SIGTERM
        assert not [pid for pid in left if alive(pid)]
        assert not list(scratch.glob("verifier-*-*"))
    finally:
        command.kill()
        command.wait()
