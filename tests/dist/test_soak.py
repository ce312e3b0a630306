"""Two thousand judged steps with checkpoints: memory, open files, threads, kept files and step times do not grow.

What this does not exercise: a live engine, sampled steps beyond those of the defaults, GPUs, and more than 2,000 steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests.meta.sources import ROOT
from tests.processes import GONE
from verifier.launch.child import descendants

STEPS = 2000
EVERY_S = 5.0
"""Seconds between two looks at the processes."""
GROWTH = {"memory": 0.05, "open files": 0.0, "threads": 0.0, "kept files": 0.02, "step": 0.10}
"""What -> share by which the median of the last quarter may exceed that of the second quarter.

Memory is the sum of proportional set sizes: an allocator's arenas and the page cache of a mapped file move it by some
percent. The time of a step is that of a machine with other work."""
OF_EACH_STEP = {"manifest.json", "batches.tar.xz"}
"""Files that every step leaves: its digests, and its batches."""


def proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def looked_at(driver: int, run: Path) -> dict[str, int]:
    found = dict.fromkeys(("memory", "open files", "threads"), 0)
    for pid in (driver, *descendants(driver)):
        try:
            found["memory"] += proportional_bytes(pid)
            found["open files"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            found["threads"] += len(list(Path(f"/proc/{pid}/task").iterdir()))
        except (*GONE, PermissionError):
            continue
    files = (name for _, _, names in run.walk() for name in names)
    return found | {"kept files": sum(name not in OF_EACH_STEP for name in files)}


def growth(values: list[float]) -> float:
    """Share by which the median of the last quarter exceeds that of the second."""
    quarter = len(values) // 4
    return median(values[-quarter:]) / median(values[quarter : 2 * quarter]) - 1.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_judged_steps_take_no_more_at_their_end(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "verifier", "train", "configs/add-sft.yaml", "--verify", "verify.keep=20"]
    command += [f"steps={STEPS}", "evaluation.stop_above=2.0", "--run", str(run)]
    seen: dict[str, list[float]] = {}
    said = tmp_path / "said"
    with (
        said.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as driver,
    ):
        while driver.poll() is None:
            for what, value in looked_at(driver.pid, run).items():
                seen.setdefault(what, []).append(value)
            time.sleep(EVERY_S)
    assert driver.returncode == 0, said.read_text()[-3000:]
    assert f"{STEPS:,} steps judged, all hold" in said.read_text()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen["step"] = [line["time_s"] for line in steps]
    grown = {what: growth(values) for what, values in seen.items()}
    print({what: (round(share, 4), median(seen[what])) for what, share in grown.items()})
    assert not {what: share for what, share in grown.items() if share > GROWTH[what]}, grown
