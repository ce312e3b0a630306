"""What the GPU tests ask of an engine's worker, through `Engine.call`."""

from __future__ import annotations

from typing import Any

import torch


def count_replays(worker: Any) -> bool:
    """From now on count how often a captured graph is replayed in this process; False if that was done before."""
    if hasattr(worker, "verifier_replays"):
        return False
    worker.verifier_replays = 0
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        worker.verifier_replays += 1
        original(graph)

    torch.cuda.CUDAGraph.replay = replay
    return True


def replays(worker: Any) -> int:
    """How often a graph was replayed since `count_replays`."""
    return int(worker.verifier_replays)
