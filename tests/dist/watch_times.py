"""Times of warm rounds beside those of cold commands, in one run; a row is broken and mended between the rounds.

    python -m tests.dist.watch_times

writes `golden/watch-times.json`, from which docs/contributing.md has its table. The load is in it: on two cores
that others use, all times are longer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.dist.test_watch import ROOT, ROW, SWAPPED, rounds
from verifier.platform.provenance import host, installed_versions, this_code

MODEL = "tiny:qwen3"
RECORD = ROOT / "golden" / "watch-times.json"
COMMANDS = ("golden", "roundtrip")


def measure(command: str, folder: Path) -> dict[str, Any]:
    """Seconds of the cold command, of the first round, and of rounds after a row was broken and mended."""
    words = [sys.executable, "-m", "verifier", command, "--model", MODEL, "-q"]
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(folder)}, "cwd": folder}
    loads, began = [os.getloadavg()[0]], time.monotonic()
    subprocess.run(words, check=True, capture_output=True, **options)
    cold = time.monotonic() - began
    output, names = folder / f"{command}.txt", folder / "verifier" / "export" / "names.py"
    good = names.read_text()
    with output.open("w") as stream:
        loop = subprocess.Popen([*words, "--watch"], stdout=stream, stderr=stream, **options)
    try:
        texts = [rounds(output, 1)]
        for number, text in enumerate((good.replace(ROW, SWAPPED), good, good + "\n"), 2):
            names.write_text(text)
            texts.append(rounds(output, number))
        loads.append(os.getloadavg()[0])
    finally:
        loop.send_signal(signal.SIGTERM)
        loop.wait()
        names.write_text(good)
    found = [re.search(r"round \d+ took ([\d.]+) s[^;\n]*(?:; )?(.*)", text) for text in texts]
    return {
        "command": command, "cold_s": round(cold, 1), "loads": [round(load, 1) for load in loads],
        "rounds": [{"s": float(item[1]), "news": item[2]} for item in found if item is not None],
    }  # fmt: skip


def main() -> None:
    """Measure all commands and write the record."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(ROOT / "verifier", folder / "verifier", ignore=shutil.ignore_patterns("__pycache__"))
        found = [measure(command, folder) for command in COMMANDS]
    commit, versions = this_code().commit, installed_versions()
    record = {"model": MODEL, "host": host(), "commit": commit, "versions": versions, "commands": found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
