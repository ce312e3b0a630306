"""The README's training example from its first step to its last, judged: what a user sees who runs it once.

What this does not exercise: other seeds, GRPO, and other processors (`tests.dist.clean_margins` runs such).
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.meta.sources import ROOT


def test_the_example_of_the_readme_holds_to_its_end(tmp_path):
    command = [sys.executable, "-m", "verifier", "train", "configs/add-sft.yaml", "--verify", "checkpoint.every=0"]
    command += ["--run", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "suspect" not in done.stderr + done.stdout
    assert not (tmp_path / "run" / "suspected.json").exists()
    found = re.search(r"trained (\d+) steps: .*accuracy ([\d.]+); (\d+) steps judged, all hold", done.stdout)
    assert found, done.stdout
    assert found[1] == found[3]
    assert float(found[2]) > 0.95
