"""Megatron's gather and scatter of rows that ranks have unequally many of, over gloo, against one process.

What this does not exercise: the experts that need them (docs/measurements.md has meshes with etp and ep).
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.dist.uneven_functions import ROWS, factors, values
from verifier.launch.fork_launcher import ForkLauncher


def test_rows_gradients_and_sums_are_those_of_one_process(trainer_launcher: ForkLauncher, tmp_path: Path) -> None:
    found = trainer_launcher.run("uneven_functions:gathered", world_size=3, run_dir=tmp_path, deadline_s=120)
    whole = torch.cat([values(rank) for rank in range(3)]).tolist()
    total = sum(factors(rank) for rank in range(3)).split(list(ROWS))  # whole numbers: no order rounds them
    for rank, item in enumerate(found):
        assert item["whole"] == whole
        assert item["gradient"] == total[rank].tolist()
        assert item["scattered"] == total[rank].tolist()
