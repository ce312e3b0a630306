"""What test_uneven_gathers.py runs on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from verifier.launch.rank import RankContext

ROWS = (2, 0, 3)
"""Rows that each rank has."""


def values(rank: int) -> torch.Tensor:
    """Rows of one rank, and the factors by which every rank weighs all rows."""
    return torch.arange(4.0 * ROWS[rank]).view(ROWS[rank], 4) + 100 * rank


def factors(rank: int) -> torch.Tensor:
    """[all rows, 4] weight of each gathered element in one rank's sum."""
    return torch.arange(4.0 * sum(ROWS)).view(-1, 4) * (rank + 1)


def gathered(context: RankContext) -> dict[str, list[list[float]]]:
    """Rows of all ranks by Megatron's gather, the gradient of this rank's, and its rows of a sum over ranks."""
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    group, rank = dist.group.WORLD, context.rank
    own = values(rank).requires_grad_()
    whole = gather_from_sequence_parallel_region(own, True, group, list(ROWS))
    (whole * factors(rank)).sum().backward()
    scattered = reduce_scatter_to_sequence_parallel_region(factors(rank), group, list(ROWS))
    return {"whole": whole.tolist(), "gradient": own.grad.tolist(), "scattered": scattered.tolist()}
