"""Functions that test_launch_*.py runs on ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from verifier.errors import UsageError
from verifier.launch import recorder
from verifier.launch.rank import RankContext


def sum_of_ranks(context: RankContext) -> dict:
    """All-reduce the rank number."""
    import torch
    import torch.distributed as dist

    print(f"hello from {context.rank}")
    context.progress(f"adding {context.rank}")
    value = torch.tensor([float(context.rank)])
    dist.all_reduce(value)
    return {
        "sum": value.item(),
        "rank": context.rank,
        "args": context.args,
        "env": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")],
        "threads": torch.get_num_threads(),
    }
